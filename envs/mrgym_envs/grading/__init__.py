"""The math grader shared by the math environments."""

from mrgym_envs.grading.api import grade, grade_batch
from mrgym_envs.grading.verdict import Options, Status, Verdict
from mrgym_envs.grading.workers import close_workers, set_workers, warm_up

__all__ = [
    "Options",
    "Status",
    "Verdict",
    "close_workers",
    "grade",
    "grade_batch",
    "set_workers",
    "warm_up",
]
