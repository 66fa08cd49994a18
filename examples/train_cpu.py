"""Train the policy in the package on a laptop, from Python.

python examples/train_cpu.py [--steps 100] [--out runs/example]
"""

import argparse

from mrgym_trainers import GDPOConfig, GDPOTrainer


def main() -> None:
    """Train, then print where every component began and ended on held-out tasks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()

    config = GDPOConfig(
        model="tiny",
        steps=args.steps,
        weights={"correctness": 1.0, "format": 0.5, "integer": 0.5},  # by name, never by position
    )
    summary = GDPOTrainer("math_multi_reward", config, out=args.out, progress=True).train()
    for key, start in summary["eval"]["start"].items():
        print(f"{key:<20} {start:.3f} -> {summary['eval']['end'][key]:.3f}")


if __name__ == "__main__":
    main()
