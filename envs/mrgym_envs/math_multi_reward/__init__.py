"""Math word problems with three rewards: correctness, format, integer."""

from mrgym_envs.math_multi_reward.env import MathMultiReward

__all__ = ["MathMultiReward"]
