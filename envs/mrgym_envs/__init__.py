"""Environments bundled with mrgym; make them by id, e.g. ``mrgym.make("math_multi_reward")``."""
