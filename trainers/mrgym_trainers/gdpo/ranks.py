"""The processes of a run: who they are, and the little they tell each other beside gradients."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from mrgym.errors import ConfigError, MissingExtraError, MrgymError, RankError

__all__ = ["Ranks", "cut", "start_ranks"]

T = TypeVar("T")

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What torch's collectives raise has no class of its own on every backend.
_SIGNS = ("gloo", "nccl", "connection", "timed out", "timeout", "process group", "rendezvous")
_KINDS = {k.__name__: k for k in MrgymError.__subclasses__() if k is not MissingExtraError}


def cut(count: int, parts: int, part: int) -> slice:
    """Return which of ``count`` things a part has: sizes differ by one at most, 0 comes last."""
    return slice(-(-count * part // parts), -(-count * (part + 1) // parts))


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of a run, as one of them sees them. One process is no group and waits for none.

    Every method is called by all ranks, in the same order.

    Attributes:
        rank: Number of this process, from 0 on.
        world: Number of processes.
        local_rank: Its number among those of the same machine; its GPU.
        timeout: Seconds to wait for the others.
        group: Torch's group of the processes, over which CPU tensors go; None for one process.
        owner: Whether :meth:`close` ends the group.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    timeout: float = 600.0
    group: Any = None
    owner: bool = False

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and shows progress."""
        return self.rank == 0

    def part(self, count: int) -> slice:
        """Return which of ``count`` things this rank has."""
        return cut(count, self.world, self.rank)

    def device(self, name: str) -> str:
        """Return the device a configuration means on this rank."""
        if self.world == 1 or name not in ("auto", "cuda"):
            return name
        if not torch.cuda.is_available():
            return "cpu" if name == "auto" else name
        return f"cuda:{self.local_rank}"

    def channel(self) -> Ranks:
        """Return the same ranks with a group of their own, for another thread to talk over."""
        if self.world == 1:
            return self
        with self.answering("opening a channel"):
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
        return replace(self, group=group, owner=False)

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in their order."""
        if self.world == 1:
            return [message]
        with self.answering("gathering rollouts or messages"):
            lengths = torch.zeros(self.world, dtype=torch.int64)
            lengths[self.rank] = len(message)
            dist.all_reduce(lengths, group=self.group)
            padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
            if message:
                padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            parts = [torch.empty_like(padded) for _ in range(self.world)]
            dist.all_gather(parts, padded, group=self.group)
        pairs = zip(parts, lengths.tolist(), strict=True)
        return [part[:length].numpy().tobytes() for part, length in pairs]

    def reduce(
        self, values: Mapping[str, float], how: Literal["sum", "max"] = "sum"
    ) -> dict[str, float]:
        """Return sum or maximum of numbers that every rank has under the same names."""
        if self.world == 1 or not values:
            return dict(values)
        numbers = torch.tensor([*values.values()], dtype=torch.float64)
        self._reduce(numbers, how)
        return dict(zip(values, numbers.tolist(), strict=True))

    def most(self, number: float) -> float:
        """Return the largest of the ranks' numbers; NaN if one is."""
        # A maximum may pass over NaN.
        numbers = self.reduce({"number": -1.0 if number != number else number}, "max")
        wrong = self.any(number != number)
        return float("nan") if wrong else numbers["number"]

    def any(self, flag: bool) -> bool:
        """Return whether it is so on any rank."""
        return bool(self.reduce({"flag": float(flag)}, "max")["flag"])

    def agree(self, error: MrgymError | None) -> None:
        """Let an error of any rank end all of them alike.

        Raises:
            MrgymError: Of the first rank that has one, with its number.
        """
        if self.world == 1:
            if error is not None:
                raise error
            return
        told = None if error is None else (type(error).__name__, str(error))
        answers = [msgspec.msgpack.decode(m) for m in self.gather(msgspec.msgpack.encode(told))]
        if any(answer is not None for answer in answers):
            self._meet()  # a rank that ended at once would cut the others off in the middle of this
        for rank, answer in enumerate(answers):
            if answer is not None and rank == self.rank and error is not None:
                raise error
            if answer is not None:
                raise _KINDS.get(answer[0], RankError)(f"rank {rank}: {answer[1]}")

    def on_first(self, make: Callable[[], T]) -> T | None:
        """Return what ``make`` returns on the first rank and None on the others.

        Raises:
            MrgymError: On all ranks, if ``make`` raised it.
        """
        made, failure = None, None
        if self.first:
            try:
                made = make()
            except MrgymError as error:
                failure = error
        self.agree(failure)
        return made

    def same_path(self, path: Path | None) -> Path | None:
        """Return the first rank's path: the others' may be named after another second."""
        told = msgspec.msgpack.encode(None if path is None else str(path))
        first = msgspec.msgpack.decode(self.gather(told)[0])
        return None if first is None else Path(first)

    @contextmanager
    def alone(self, gpus: int = 1) -> Iterator[None]:
        """Let processes started inside ``with`` belong to no group, and see this rank's GPU alone.

        Raises:
            ConfigError: If they need more GPUs than a rank has.
        """
        if self.world == 1:
            yield
            return
        if gpus > 1:
            raise ConfigError(
                f"vllm.tensor_parallel_size: got {gpus} with an engine on each of {self.world} "
                "ranks, expected 1; start servers of several GPUs and name them in vllm.servers"
            )
        before = dict(os.environ)
        visible = before.get("CUDA_VISIBLE_DEVICES")
        for name in (*_VARIABLES, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        if torch.cuda.is_available():
            names = visible.split(",") if visible else [str(i) for i in range(self.local_rank + 1)]
            os.environ["CUDA_VISIBLE_DEVICES"] = names[self.local_rank]
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)

    def close(self) -> None:
        """End the group, once every rank is here."""
        if self.owner and dist.is_initialized():
            self._meet()
            dist.destroy_process_group()

    def leave(self) -> None:
        """End this rank's part of the group without waiting: the others may be gone already.

        What is left to the end of the process may abort it, and hide the error's exit code.
        """
        if self.owner and dist.is_initialized() and dist.get_backend() == "gloo":
            with suppress(RuntimeError):
                dist.destroy_process_group()

    @contextmanager
    def answering(self, doing: str) -> Iterator[None]:
        """Turn what collectives raise into one line.

        Raises:
            RankError: If other ranks do not answer.
        """
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, MrgymError) or self.world == 1 or not _is_silence(error):
                raise
            raise RankError(
                f"rank {self.rank} of {self.world}, {doing}: got {_brief(error)}, expected every "
                f"rank to answer within {self.timeout:g} s; a rank has died or hangs (look at its "
                "own output), or is slower than ranks_timeout allows"
            ) from error

    def _meet(self) -> None:
        with self.answering("ending the run"):
            dist.barrier(group=self.group)

    def _reduce(self, numbers: Tensor, how: str) -> None:
        op = dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX
        with self.answering("adding up numbers"):
            dist.all_reduce(numbers, op=op, group=self.group)


def start_ranks(*, device: str = "auto", timeout: float = 600.0) -> Ranks:
    """Return the ranks that ``torchrun`` (or Slurm, by the same variables) started; one without it.

    Raises:
        ConfigError: If some of the variables are missing, or the machine has too few GPUs.
        RankError: If not all ranks come within the timeout.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():
        world = dist.get_world_size()
    if world == 1:
        return Ranks(timeout=timeout)
    owner = not dist.is_initialized()
    rank = dist.get_rank() if not owner else _rank(world)
    local = int(os.environ.get("LOCAL_RANK", "0" if owner else str(rank)))
    ranks = Ranks(rank, world, local, timeout, owner=owner)
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        _take_gpu(local)
    limit = timedelta(seconds=timeout)
    with ranks.answering("meeting the other ranks"):
        if owner:
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
            dist.init_process_group(backend, timeout=limit)
        group = dist.new_group(backend="gloo", timeout=limit)
    return replace(ranks, group=group)


def _rank(world: int) -> int:
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(
            f"ranks: got WORLD_SIZE={world} without {missing}, expected all of {[*_VARIABLES]}; "
            "start with torchrun, or set them for every process"
        )
    return int(os.environ["RANK"])


def _take_gpu(local_rank: int) -> None:
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"ranks: got local rank {local_rank} on a machine with {count} GPUs, expected a GPU a "
            "rank; lower --nproc-per-node, or set device=cpu"
        )
    torch.cuda.set_device(local_rank)


def _is_silence(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(sign in text for sign in _SIGNS)


def _brief(error: RuntimeError) -> str:
    return f"{type(error).__name__} ({' '.join(str(error).split())[:160]})"
