"""Math problems with two rewards: correctness, and brevity that only a right answer earns."""

from mrgym_envs.math_length.env import MathLength

__all__ = ["MathLength"]
