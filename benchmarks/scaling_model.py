"""Rollouts a second and idle share of three layouts on 1 to 512 H100s, and where limits lie.

    python benchmarks/scaling_model.py [--quick]

Model output throughout: nothing was measured on a GPU.

``scaling_theory.py`` describes the layouts and has the model, ``scaling_simulation.py`` checks it,
``scaling_cpu.py`` compares them with runs of the tiny policy.
Every assumption about hardware is a field of :class:`Hardware`; docs/scaling.md discusses them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from scaling_simulation import simulate, workers_needed
from scaling_theory import LAYOUTS, Engine, LayoutName, Lengths, Setup, Trainer, Work, analytic

GPUS = (1, 8, 64, 512)
LONG = Lengths.log_normal(median=600, sigma=0.8, limit=4096)

VARIANTS: dict[str, tuple[LayoutName, int]] = {
    "colocated": ("colocated", 0),
    "one-step-off": ("one_step_off", 1),
    "separate, 1 old": ("separate", 1),
    "separate, 4 old": ("separate", 4),
}


@dataclass(frozen=True)
class Hardware:
    """An H100 SXM in nodes of eight, by public figures and assumptions (marked so).

    Attributes:
        flops: Peak dense bfloat16.
        mfu: Share of it that 6 x parameters x tokens of training reach (assumed).
        decode_share: Share of it that decoding's products reach (assumed).
        hbm: Bytes a second; ``hbm_share`` of them are reached (assumed).
        memory: Usable bytes of 80 GB (assumed).
        scratch: Of these for activations, graphs and buffers (assumed).
        iteration_s: An engine's own time in an iteration (assumed).
        allreduce_s: Latency of one of two all-reduces a layer between GPUs (assumed).
        gather: Bytes a second of all-gather and reduce-scatter, in a node by NVLink and between
            nodes by eight 400 Gb/s links (assumed 0.9 of 400 GB/s).
        broadcast: Bytes a second from one GPU to engines elsewhere, by one link (assumed).
        host: Bytes a second through host memory: to the host, into the shared file, to the GPU, one
            after another (assumed 10, 8 and 10 GB/s).
        switch_s: Putting an engine to sleep and waking it (assumed).
    """

    flops: float = 989e12
    mfu: float = 0.40
    decode_share: float = 0.5
    hbm: float = 3.35e12
    hbm_share: float = 0.7
    memory: float = 76e9
    scratch: float = 8e9
    iteration_s: float = 2e-3
    allreduce_s: float = 15e-6
    gather: float = 360e9
    broadcast: float = 45e9
    host: float = 3e9
    switch_s: float = 1.0


@dataclass(frozen=True)
class Model:
    """A policy; weights in engines take 2 bytes a parameter, training 16 (float32 AdamW)."""

    name: str
    parameters: float
    layers: int
    token_bytes: float
    """Key/value cache of a token: 2 x layers x KV heads x head width x 2 bytes."""


MODELS = (
    Model("1.5B", 1.54e9, 28, 2 * 28 * 2 * 128 * 2),
    Model("32B", 32.8e9, 64, 2 * 64 * 8 * 128 * 2),
)
_PASS_TOKENS = 16_384  # of a GPU in a forward pass
_MOST_SLOTS = 256  # max_num_seqs
_STATE_BYTES, _WEIGHT_BYTES = 16, 2


def work_for(gpus: int, lengths: Lengths = LONG) -> Work:
    """Return a step's work: 128 rollouts a GPU, at least 512 and at most 8,192."""
    return Work(min(max(128 * gpus, 512), 8192), lengths)


def engine_for(
    hw: Hardware, model: Model, work: Work, width: int, resident: float
) -> Engine | None:
    """Return an engine on ``width`` GPUs, or None if it does not fit beside ``resident`` bytes."""
    weights = model.parameters * _WEIGHT_BYTES
    room = width * (hw.memory - hw.scratch - resident) - weights
    each = model.token_bytes * (work.prompt + work.lengths.mean_seen)
    slots = min(int(room // each), _MOST_SLOTS)
    if slots < work.group:
        return None
    bandwidth = hw.hbm * hw.hbm_share * width
    row_s = 2 * model.parameters / (hw.flops * hw.decode_share * width)
    latency = 2 * model.layers * hw.allreduce_s if width > 1 else 0.0
    return Engine(
        base_s=hw.iteration_s + latency + weights / bandwidth,
        row_s=row_s,
        context_s=model.token_bytes / bandwidth,
        prompt_s=work.prompt * row_s,
        slots=slots,
        gpus=width,
    )


def trainer_for(hw: Hardware, model: Model, gpus: int) -> Trainer | None:
    """Return a fully sharded trainer, or None if it does not fit."""
    if model.parameters * _STATE_BYTES / gpus > hw.memory - hw.scratch:
        return None
    # Weights are gathered twice in bfloat16 and gradients scattered in float32.
    sent = model.parameters * (2 + 2 + 4) if gpus > 1 else 0.0
    return Trainer(
        token_s=6 * model.parameters / (hw.flops * hw.mfu * gpus),
        pass_s=sent / hw.gather,
        pass_tokens=_PASS_TOKENS * gpus,
        fixed_s=2 * _STATE_BYTES * model.parameters / gpus / (hw.hbm * hw.hbm_share),
        gpus=gpus,
    )


def sync_seconds(hw: Hardware, model: Model, way: str, trainers: int) -> float:
    """Return seconds of a weight sync by ``ipc``, ``nccl`` or ``shared_memory``."""
    weights = model.parameters * _WEIGHT_BYTES
    gather_s = weights / hw.gather if trainers > 1 else 0.0
    bandwidths = {
        "ipc": hw.hbm * hw.hbm_share / 3,
        "nccl": hw.broadcast,
        "shared_memory": hw.host,
    }
    return gather_s + weights / bandwidths[way]


def setups(
    hw: Hardware,
    model: Model,
    work: Work,
    layout: LayoutName,
    gpus: int,
    way: str | None,
    staleness: int,
) -> Iterator[Setup]:
    """Yield every way to lay the work out: engine widths and splits that fit."""
    for width in (width for width in (1, 2, 4, 8) if width <= gpus):
        for sampling, training in _splits(layout, gpus, width):
            trainer = trainer_for(hw, model, training)
            shared = sampling + training > gpus
            resident = model.parameters * _STATE_BYTES / training if shared else 0.0
            engine = engine_for(hw, model, work, width, resident)
            if trainer is None or engine is None:
                continue
            sync_s = sync_seconds(hw, model, way or ("ipc" if shared else "nccl"), training)
            switch_s = hw.switch_s if layout == "colocated" else 0.0
            engines = sampling // width
            yield Setup(layout, gpus, engine, engines, trainer, sync_s, switch_s, staleness)


def _splits(layout: LayoutName, gpus: int, width: int) -> Iterator[tuple[int, int]]:
    if layout == "colocated" or (layout == "one_step_off" and gpus == 1):
        yield gpus, gpus
        return
    unit = max(width, gpus // 64)
    yield from ((sampling, gpus - sampling) for sampling in range(unit, gpus, unit))


def best(
    hw: Hardware,
    model: Model,
    work: Work,
    layout: LayoutName,
    gpus: int,
    way: str | None = None,
    staleness: int = 1,
) -> Setup | None:
    """Return the setup the model expects most rollouts a second of, if any fits."""
    found = [*setups(hw, model, work, layout, gpus, way, staleness)]
    return max(found, key=lambda setup: analytic(setup, work).rollouts_s, default=None)


# --- tables ---------------------------------------------------------------------------------------


def table_layouts(hw: Hardware, steps: int) -> None:
    """Print throughput and idle share of the best setup of each layout, simulated and expected."""
    print(
        "\n| policy | H100s | rollouts a step | layout | sample + train GPUs, width | slots |",
        end="",
    )
    print(" step s | rollouts/s | idle | model: rollouts/s | idle |")
    print("| --- | ---: | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for model in MODELS:
        for gpus in GPUS:
            work = work_for(gpus)
            for name, (layout, staleness) in VARIANTS.items():
                setup = best(hw, model, work, layout, gpus, staleness=staleness)
                split = layout == "separate" and gpus == 1
                reason = "nothing to split" if split else "does not fit"
                start = f"| {model.name} | {gpus} | {work.rollouts:,} | {name} |"
                print(
                    start, f"{reason} | | | | | | |" if setup is None else _row(setup, work, steps)
                )


def _row(setup: Setup, work: Work, steps: int) -> str:
    seen, expected = simulate(setup, work, steps=steps), analytic(setup, work)
    sampling = setup.engines * setup.engine.gpus
    gpus = "all" if setup.shared else f"{sampling} + {setup.trainer.gpus}"
    return (
        f"{gpus}, {setup.engine.gpus} | {setup.engine.slots} | {seen.step_s:.1f} | "
        f"{seen.rollouts_s:,.1f} | {seen.idle:.0%} | {expected.rollouts_s:,.1f} | "
        f"{expected.idle:.0%} |"
    )


def table_scoring(hw: Hardware, steps: int) -> None:
    """Print how many scoring workers a layout needs, and what fewer cost (simulated)."""
    kinds = {"numbers 313,700/s": 1 / 313_700, "mixed 2,539/s": 1 / 2539, "sympy 15/s": 1 / 15}
    kinds |= {"judge 50 ms": 0.05, "judge 2 s": 2.0}
    print("\n| policy | H100s | layout | rollouts/s |" + "".join(f" {k} |" for k in kinds))
    print("| --- | ---: | --- | ---: |" + " ---: |" * len(kinds))
    for model in MODELS:
        for gpus in GPUS:
            for layout in ("colocated", "separate"):
                work = work_for(gpus)
                setup = best(hw, model, work, layout, gpus)
                if setup is not None:
                    needed = [_workers(setup, work, score_s) for score_s in kinds.values()]
                    rate = analytic(setup, work).rollouts_s
                    cells = " | ".join(f"{n:,}" for n in needed)
                    print(f"| {model.name} | {gpus} | {layout} | {rate:,.0f} | {cells} |")
    _too_few(hw, steps)


def _workers(setup: Setup, work: Work, score_s: float) -> int:
    """Return the fewest workers with which scoring costs under 5% more than it must."""
    scored = replace(work, score_s=score_s)
    if setup.layout != "separate":
        return workers_needed(setup, scored)
    floor = analytic(setup, replace(scored, workers=work.rollouts)).step_s
    low, high = 1, work.rollouts
    while low < high:
        middle = (low + high) // 2
        slowed = analytic(setup, replace(scored, workers=middle)).step_s
        low, high = (low, middle) if slowed <= 1.05 * floor else (middle + 1, high)
    return low


def _too_few(hw: Hardware, steps: int) -> None:
    """Print throughput with fewer and more workers than needed."""
    shares = (0.25, 0.5, 1, 2)
    print("\n| 1.5B, 64 H100s, judge 2 s: workers |", " | ".join(map(str, shares)), "x needed |")
    print("| --- |" + " ---: |" * len(shares))
    work = work_for(64)
    for layout in LAYOUTS:
        setup = best(hw, MODELS[0], work, layout, 64)
        if setup is not None:
            needed = _workers(setup, work, 2.0)
            rates = [
                simulate(
                    setup,
                    replace(work, score_s=2.0, workers=at_least_one(needed * share)),
                    steps=steps,
                ).rollouts_s
                for share in shares
            ]
            free = simulate(setup, work, steps=steps).rollouts_s
            cells = " | ".join(f"{rate / free:.2f}" for rate in rates)
            print(f"| {layout}, {needed:,} needed | {cells} |")


def at_least_one(x: float) -> int:
    """Return x rounded up, at least 1."""
    return max(1, math.ceil(x))


def table_sync(hw: Hardware) -> None:
    """Print what ways of a weight sync cost, by the model."""
    print("\n| policy | H100s | layout | way | sync s | share of a step |")
    print("| --- | ---: | --- | --- | ---: | ---: |")
    for model in MODELS:
        for gpus in GPUS[1:]:
            pairs: tuple[tuple[LayoutName, str], ...] = (
                ("colocated", "ipc"),
                ("colocated", "shared_memory"),
                ("separate", "nccl"),
            )
            for layout, way in pairs:
                setup = best(hw, model, work_for(gpus), layout, gpus, way)
                if setup is not None:
                    share = setup.sync_s / analytic(setup, work_for(gpus)).step_s
                    print(
                        f"| {model.name} | {gpus} | {layout} | {way} | {setup.sync_s:.2f} "
                        f"| {share:.1%} |"
                    )


def table_sensitivity(hw: Hardware, steps: int) -> None:
    """Print how the order of layouts changes with what was assumed."""
    print("\n| 64 H100s, rollouts/s |", " | ".join(VARIANTS), "|")
    print("| --- |" + " ---: |" * len(VARIANTS))
    cases = {
        "as assumed": (hw, LONG),
        "MFU 0.35": (replace(hw, mfu=0.35), LONG),
        "MFU 0.45": (replace(hw, mfu=0.45), LONG),
        "HBM share 0.5": (replace(hw, hbm_share=0.5), LONG),
        "iteration 5 ms": (replace(hw, iteration_s=5e-3), LONG),
        "all completions equally long": (hw, Lengths.fixed(round(LONG.mean))),
        "longer tail (sigma 1.2)": (hw, Lengths.log_normal(600, 1.2, 4096)),
        "limit of 16,384 tokens, median 2,400": (hw, Lengths.log_normal(2400, 0.8, 16_384)),
    }
    for model in MODELS:
        for name, (hardware, lengths) in cases.items():
            work = work_for(64, lengths)
            found = [
                best(hardware, model, work, layout, 64, staleness=staleness)
                for layout, staleness in VARIANTS.values()
            ]
            rates = [simulate(s, work, steps=steps).rollouts_s if s else 0.0 for s in found]
            print(f"| {model.name}, {name} |", " | ".join(f"{rate:,.1f}" for rate in rates), "|")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    steps = 2 if parser.parse_args().quick else 8
    print("Model output for H100s under the assumptions of class Hardware; nothing was measured.")
    hw = Hardware()
    table_layouts(hw, steps)
    table_scoring(hw, steps)
    table_sync(hw)
    table_sensitivity(hw, steps)


if __name__ == "__main__":
    main()
