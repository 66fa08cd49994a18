"""Scores a second through the environment service, against the same scorer in process.

    python benchmarks/service.py
    python benchmarks/service.py --openenv-python .venv-openenv/bin/python
    python benchmarks/service.py --requests 100000

The client is a process of its own with 64 connections on loopback. With ``--requests`` every
answer is matched to its question, and the client's counts to the service's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import uvloop
import websockets

import mrgym

JSON, MSGPACK = "application/json", "application/msgpack"
HERE = Path(__file__).parent
ENCODE = {JSON: msgspec.json.encode, MSGPACK: msgspec.msgpack.encode}
DECODE = {JSON: msgspec.json.decode, MSGPACK: msgspec.msgpack.decode}


class Connection:
    """A keep-alive HTTP/1.1 connection that does as little as it can."""

    def __init__(self, port: int, media: str = JSON) -> None:
        self.port, self.media = port, media

    async def open(self) -> Connection:
        """Connect; return this."""
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def ask(self, method: str, path: str, body: object = None) -> object:
        """Return the decoded answer.

        Raises:
            RuntimeError: If it is an error.
        """
        data = b"" if body is None else ENCODE[self.media](body)
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {self.media}\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        self.writer.write(head.encode() + data)
        answer = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        length = int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        content = await self.reader.readexactly(length)
        if not answer.startswith(b"http/1.1 200"):
            raise RuntimeError(f"{method} {path}: {answer[:40]!r} {content[:300]!r}")
        return content if path == "/metrics" else DECODE[self.media](content)

    def close(self) -> None:
        """Hang up."""
        self.writer.close()


def item(i: int) -> dict:
    """Return a question whose answer can only be its own."""
    said = i if i % 3 else i + 1
    text = f"<think>{i}</think>\n<answer>{said}</answer>" if i % 2 else f"<answer>{said}</answer>"
    task = {"prompt": f"What is {i}?", "answer": str(i), "id": f"q{i}"}
    return {"completion": text, "task": task}


def is_answer(i: int, result: dict) -> bool:
    """Return whether a result is that of question ``i``."""
    expected = {"correctness": float(i % 3 != 0), "format": float(i % 2), "integer": 1.0}
    return result["task_id"] == f"q{i}" and result["components"] == expected


async def hammer(
    concurrency: int, more: Callable[[], bool], ask: Callable[[int], Awaitable[int]]
) -> dict:
    """Run so many clients until there is no more; return scores a second and latencies."""
    latencies: list[float] = []
    scores = 0

    async def client(number: int) -> None:
        nonlocal scores
        while more():
            start = time.perf_counter()
            done = await ask(number)
            scores += done
            latencies.append(time.perf_counter() - start)

    start = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(concurrency)))
    wall = time.perf_counter() - start
    cuts = statistics.quantiles(latencies, n=100)
    return {
        "scores_per_s": round(scores / wall),
        "requests": len(latencies),
        "p50_ms": round(cuts[49] * 1e3, 2),
        "p99_ms": round(cuts[98] * 1e3, 2),
    }


def until(seconds: float) -> Callable[[], bool]:
    """Return what says whether the time is not over yet."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() < end


async def score_case(port: int, media: str, batch: int, args: argparse.Namespace) -> dict:
    """Score batches, a request each."""
    connections = [await Connection(port, media).open() for _ in range(args.concurrency)]
    items = [item(i) for i in range(batch)]

    async def ask(number: int) -> int:
        results = (await connections[number].ask("POST", "/score", {"items": items}))["results"]
        assert is_answer(batch - 1, results[-1])
        return len(results)

    out = await hammer(args.concurrency, until(args.seconds), ask)
    for connection in connections:
        connection.close()
    return out


async def session_case(port: int, media: str, args: argparse.Namespace) -> dict:
    """Reset and step in a session for each client: a score is two requests."""
    connections = [await Connection(port, media).open() for _ in range(args.concurrency)]
    sessions = [(await c.ask("POST", "/sessions", {}))["id"] for c in connections]
    count = [0] * args.concurrency

    async def ask(number: int) -> int:
        path = f"/sessions/{sessions[number]}"
        count[number] += 2
        reset = {"seq": count[number] - 1, "seed": number}
        await connections[number].ask("POST", f"{path}/reset", reset)
        step = {"seq": count[number], "action": "<answer>7</answer>"}
        out = await connections[number].ask("POST", f"{path}/step", step)
        assert out["info"]["reward_components"]["integer"] == 1.0
        return 1

    out = await hammer(args.concurrency, until(args.seconds), ask)
    for connection, session in zip(connections, sessions, strict=True):
        await connection.ask("DELETE", f"/sessions/{session}")
        connection.close()
    return out


async def openenv_case(port: int, args: argparse.Namespace) -> dict:
    """The same over OpenEnv's WebSocket: reset and step, a session for each client."""
    url = f"ws://127.0.0.1:{port}/ws"
    sockets = [await websockets.connect(url, compression=None) for _ in range(args.concurrency)]

    async def say(number: int, kind: str, data: dict) -> dict:
        await sockets[number].send(json.dumps({"type": kind, "data": data}))
        return json.loads(await sockets[number].recv())["data"]

    async def ask(number: int) -> int:
        await say(number, "reset", {"seed": number})
        out = await say(number, "step", {"text": "<answer>7</answer>"})
        found = out["observation"].get("metadata") or out.get("metadata")
        assert found["reward_components"]["integer"] == 1.0, out
        return 1

    out = await hammer(args.concurrency, until(args.seconds), ask)
    for socket in sockets:
        await socket.close()
    return out


async def count_case(port: int, media: str, args: argparse.Namespace) -> dict:
    """Ask every question once; find each answer, and the service's counts."""
    connections = [await Connection(port, media).open() for _ in range(args.concurrency)]
    before = await metrics(port)
    questions: Iterator[int] = iter(range(args.requests))
    left = [args.requests]
    answered = [0] * args.requests
    wrong = 0

    def more() -> bool:
        left[0] -= 1
        return left[0] >= 0

    async def ask(number: int) -> int:
        nonlocal wrong
        i = next(questions)
        (result,) = (await connections[number].ask("POST", "/score", {"items": [item(i)]}))[
            "results"
        ]
        answered[i] += 1
        wrong += not is_answer(i, result)
        return 1

    out = await hammer(args.concurrency, more, ask)
    after = await metrics(port)
    counted = {name: after[name] - before[name] for name in after}
    out |= {
        "lost": answered.count(0),
        "doubled": sum(n > 1 for n in answered),
        "wrong": wrong,
        "service_scored": counted["scored"],
        "service_requests": counted["requests"],
    }
    for connection in connections:
        connection.close()
    assert (out["lost"], out["doubled"], out["wrong"]) == (0, 0, 0), out
    assert out["service_scored"] == out["service_requests"] == args.requests, out
    return out


async def metrics(port: int) -> dict[str, int]:
    """Return what the service has counted."""
    connection = await Connection(port).open()
    lines = (await connection.ask("GET", "/metrics")).decode().splitlines()
    connection.close()
    starts = {
        "scored": "mrgym_completions_scored_total",
        "requests": 'mrgym_requests_total{method="POST",route="/score"',
    }
    return {
        name: sum(int(float(x.rpartition(" ")[2])) for x in lines if x.startswith(start))
        for name, start in starts.items()
    }


def inline(batch: int, seconds: float) -> dict:
    """Return scores a second in this process."""
    env = mrgym.make("math_multi_reward")
    items = [item(i) for i in range(batch)]
    tasks = [mrgym.Task(x["task"]["prompt"], x["task"]["answer"], x["task"]["id"]) for x in items]
    texts = [x["completion"] for x in items]
    scores, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        scores += len(mrgym.score_completions(env, tasks, texts))
    return {"scores_per_s": round(scores / (time.perf_counter() - start))}


@contextmanager
def server(*command: str) -> Iterator[int]:
    """Run a server that says where it listens; yield its port."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        yield int(line.rpartition(":")[2])
    finally:
        process.terminate()
        assert process.wait(60) is not None


def show(name: str, outs: list[dict]) -> None:
    """Print the round whose rate is the median."""
    out = sorted(outs, key=lambda o: o["scores_per_s"])[len(outs) // 2]
    print(f"{name:28s} " + "  ".join(f"{k} {v}" for k, v in out.items()), flush=True)


def cases(port: int, peer: int | None, args: argparse.Namespace) -> dict[str, Callable[[], dict]]:
    """Return what is run in turn, by name."""
    run = uvloop.run
    out: dict[str, Callable[[], dict]] = {}
    for batch in (1, args.batch):
        out[f"inline, batch {batch}"] = partial(inline, batch, args.seconds)
    for media in (JSON, MSGPACK):
        name = media.rpartition("/")[2]
        for batch in (1, args.batch):
            out[f"{name}, batch {batch}"] = lambda m=media, b=batch: run(
                score_case(port, m, b, args)
            )
        out[f"{name}, reset + step"] = lambda m=media: run(session_case(port, m, args))
    if peer is not None:
        out["OpenEnv, reset + step"] = lambda: run(openenv_case(peer, args))
    return out


def main() -> None:
    """Run the cases in turn, or count requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--openenv-python", default="")
    args = parser.parse_args()
    print(f"python {platform.python_version()}, {os.cpu_count()} cores, {args.concurrency} clients")
    ours = [sys.executable, "-m", "mrgym", "serve", "math_multi_reward", "--port", "0"]
    with ExitStack() as servers:
        port = servers.enter_context(server(*ours))
        if args.requests:
            for media in (JSON, MSGPACK):
                show(f"{media}, counted", [uvloop.run(count_case(port, media, args))])
            return
        peer = None
        if args.openenv_python:
            script = str(HERE / "service_peers" / "openenv_server.py")
            peer = servers.enter_context(server(args.openenv_python, script))
        chosen = cases(port, peer, args)
        outs: dict[str, list[dict]] = {name: [] for name in chosen}
        for _ in range(args.rounds):
            for name, case in chosen.items():
                outs[name].append(case())
    for name in chosen:
        show(name, outs[name])


if __name__ == "__main__":
    main()
