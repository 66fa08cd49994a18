"""Trains on as many ranks as it is started on: ``train.py OUT CASES``.

CASES is JSON: a mapping of names to ``{"env": CLASS, "config": {...}}``. Each leaves a run folder
OUT/NAME, and what every rank saw in OUT/NAME-RANK.json.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import mrgym
from mrgym.cli.ending import end_process
from mrgym_trainers import GDPOConfig, GDPOTrainer

RANK = int(os.environ.get("RANK", "0"))
LAST = str(RANK + 1) == os.environ.get("WORLD_SIZE")


class Letters(mrgym.SingleTurnEnv):
    """Two scores; the second is missing where nothing was said in lower case."""

    def tasks(self, split):
        return [mrgym.Task(prompt=f"{split} {i:03d}: say ", answer={"i": i}) for i in range(16)]

    @mrgym.component(low=0, high=1)
    def lower(self, task, completion):
        return sum(c.islower() for c in completion) / max(len(completion), 1)

    @mrgym.component(low=-1, high=0, weight=0.5, optional=True)
    def brief(self, task, completion):
        if not any(c.islower() for c in completion):
            return mrgym.ABSENT
        return -min(len(completion), 10) / 10


class Seldom(Letters):
    """Half of the tasks give no signal."""

    @mrgym.component(low=0, high=1)
    def lower(self, task, completion):
        return 1.0 if task.answer["i"] % 2 else super().lower(task, completion)

    @mrgym.component(low=-1, high=0, weight=0.5, optional=True)
    def brief(self, task, completion):
        return 0.0 if task.answer["i"] % 2 else super().brief(task, completion)


class Chat(mrgym.MultiTurnEnv):
    """Asks a second time."""

    max_turns = 3

    def tasks(self, split):
        return [mrgym.Task(prompt=f"{split} {i:03d}? ") for i in range(16)]

    def respond(self, state, completion):
        return "and then?" if state.turn < 2 else None

    @mrgym.component(low=0, high=20, reduce="sum")
    def long(self, state, completion):
        return min(len(completion), 10)

    @mrgym.component(low=0, high=1)
    def lower(self, state, completion):
        return completion[:1].islower()


class Equal(Letters):
    """No group carries signal."""

    brief = None

    @mrgym.component(low=0, high=1)
    def lower(self, task, completion):
        return 0.5


class Faulty(Letters):
    """The last rank cannot score from the third batch on."""

    calls = 0

    @mrgym.component(low=0, high=1)
    def lower(self, task, completion):
        Faulty.calls += 1
        if Faulty.calls > 8 and LAST:
            return 2.0
        return super().lower(task, completion)


class Ending(Letters):
    """The last rank is killed, or stopped, in the middle of scoring."""

    calls = 0
    signal = signal.SIGKILL

    @mrgym.component(low=0, high=1)
    def lower(self, task, completion):
        Ending.calls += 1
        if Ending.calls > 8 and LAST:
            os.kill(os.getpid(), self.signal)
        return super().lower(task, completion)


class Hanging(Ending):
    """Stopped: its connections stay open."""

    signal = signal.SIGSTOP


def main():
    torch.set_num_threads(1)
    out, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    if len(cases) > 1 and "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")  # else each run makes, and ends, a group of its own
    try:
        for name, case in cases.items():
            env = globals()[case["env"]]()
            trainer = GDPOTrainer(env, GDPOConfig(**case["config"]), out=out / name)
            trainer.train()
            (out / f"{name}-{RANK}.json").write_text(json.dumps(trainer.history))
    except mrgym.MrgymError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        end_process(3)


if __name__ == "__main__":
    main()
