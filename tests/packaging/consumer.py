"""What a project that depends on mrgym might write; test_wheel.py type-checks and runs it."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

import mrgym
from mrgym_trainers.advantages import AdvantageConfig, compute_advantages


class Tower(mrgym.MultiRewardEnv[np.int64, np.int64]):
    """A tower of blocks: one that grows too fast falls."""

    components = mrgym.components(
        stable=mrgym.Component(low=0, high=1, doc="still stands"),
        height=mrgym.Component(
            low=0, high=10, weight=0.1, gate=mrgym.Gate(on="stable", at_least=1)
        ),
    )

    def __init__(self, limit: int = 3) -> None:
        self.observation_space = gym.spaces.Discrete(11)
        self.action_space = gym.spaces.Discrete(11)
        self.limit = limit

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.int64, dict[str, Any]]:
        super().reset(seed=seed)
        return np.int64(0), {}

    def step(self, action: np.int64) -> tuple[np.int64, float, bool, bool, dict[str, Any]]:
        scores = {"stable": bool(action <= self.limit), "height": float(action)}
        return self.emit(action, scores, terminated=True)


class Greeting(mrgym.SingleTurnEnv):
    """Say hello, in few words."""

    def tasks(self, split: str) -> list[mrgym.Task]:
        names = ["Ada", "Alan"] if split == "train" else ["Grace"]
        return [mrgym.Task(prompt=f"Greet {name}.", answer=name) for name in names]

    @mrgym.component(low=0, high=1)
    def names_them(self, task: mrgym.Task, completion: str) -> bool:
        return str(task.answer) in completion

    @mrgym.component(low=-1, high=0, weight=0.5)
    async def brevity(self, task: mrgym.Task, completion: str) -> float:
        return max(-1.0, -len(completion) / 100)


def rewards_of(env: mrgym.MultiRewardEnv[Any, Any], action: object) -> dict[str, float]:
    """Play one step and return its components."""
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step(action)
    components: dict[str, float] = info["reward_components"]
    assert terminated
    assert abs(float(reward) - sum(components.values())) < 1e-9
    return components


def main() -> None:
    assert rewards_of(Tower(), 2) == {"stable": 1.0, "height": 2.0}
    assert rewards_of(Tower(), 9) == {"stable": 0.0, "height": 0.0}
    assert set(rewards_of(Greeting(), "Hello Ada")) == {"names_them", "brevity"}

    mrgym.register("greeting", Greeting)
    assert mrgym.check_env("greeting").ok
    env = mrgym.make("math_multi_reward", train_count=8, eval_count=8)
    assert rewards_of(env, "<think>?</think>\n<answer>1</answer>")["format"] == 1.0

    out = compute_advantages(
        {
            mrgym.reward_key("correctness"): [1.0, 0.0, 1.0, 0.0],
            mrgym.reward_key("format"): [1.0, 1.0, 0.0, 0.0],
        },
        [0, 0, 1, 1],
        AdvantageConfig(estimator="gdpo", weights={"correctness": 1.0, "format": 0.5}),
    )
    assert out.advantages[0] > 0 > out.advantages[1]
    assert set(out.by_component) == {"correctness", "format"}
    print("consumer ok")


if __name__ == "__main__":
    main()
