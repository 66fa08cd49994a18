"""Training from a project that depends on mrgym[train]; used like consumer.py."""

from __future__ import annotations

import sys

import mrgym
from mrgym_trainers import GDPOConfig, GDPOTrainer


class Digits(mrgym.SingleTurnEnv):
    """Answer with one digit, briefly."""

    def tasks(self, split: str) -> list[mrgym.Task]:
        numbers = range(5) if split == "train" else range(5, 8)
        return [mrgym.Task(prompt=f"{n}?", answer=str(n)) for n in numbers]

    @mrgym.component(low=0, high=1)
    def digit(self, task: mrgym.Task, completion: str) -> bool:
        return completion.strip().isdigit()

    @mrgym.component(low=-1, high=0, weight=0.5)
    def brevity(self, task: mrgym.Task, completion: str) -> float:
        return -min(len(completion) / 50, 1.0)


def main(out: str) -> None:
    config = GDPOConfig(steps=1, prompts_per_step=2, group_size=4, eval_tasks=3)
    summary = GDPOTrainer(Digits(), config, out=out).train()
    assert summary["steps"] == 1
    assert set(summary["eval"]["end"]) == {"reward", "reward/digit", "reward/brevity"}
    print("consumer ok")


if __name__ == "__main__":
    main(sys.argv[1])
