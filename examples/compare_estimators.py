"""Matched runs that differ in ``estimator=`` alone: GDPO against GRPO on unequal reward scales.

GRPO normalises the sum, so a component on a small scale is drowned by the others; GDPO normalises
every component on its own and does not notice scales.

python examples/compare_estimators.py [--steps 40] [--scale 0.1]
"""

import argparse

import mrgym
from mrgym_envs.math_multi_reward import MathMultiReward
from mrgym_trainers import GDPOConfig, GDPOTrainer


class ScaledMath(MathMultiReward):
    """Math problems whose correctness is worth ``scale`` instead of 1."""

    scale = 0.1

    @mrgym.component(low=0)
    def correctness(self, task: mrgym.Task, completion: str) -> float:
        """``scale`` if the answer is right."""
        return self.scale * super().correctness(task, completion)


def run(estimator: str, steps: int, seed: int) -> dict[str, float]:
    """Train with one estimator and return the held-out means at the end."""
    config = GDPOConfig(model="tiny", steps=steps, seed=seed, estimator=estimator)
    end: dict[str, float] = GDPOTrainer(ScaledMath(), config).train()["eval"]["end"]
    return end


def main() -> None:
    """Print the held-out means of both runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    ScaledMath.scale = args.scale
    for estimator in ("gdpo", "grpo"):
        end = run(estimator, args.steps, args.seed)
        right = end["reward/correctness"] / args.scale
        print(
            f"{estimator}: correct {right:.3f}  format {end['reward/format']:.3f}  "
            f"integer {end['reward/integer']:.3f}  after {args.steps} steps"
        )


if __name__ == "__main__":
    main()
