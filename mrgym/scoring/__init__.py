"""Where score functions are declared and run.

Score functions run where a :class:`Scorer` puts them. A function that raises or hangs gives an
:class:`Outcome` with a status, never a zero.
"""

from mrgym.scoring.declare import ScoreMethod, collect_score_methods, component
from mrgym.scoring.inline import InlineScorer, Outcome, Scorer, Status
from mrgym.scoring.pool import CallResult, WorkerPool
from mrgym.scoring.workers import WorkerScorer

__all__ = [
    "CallResult",
    "InlineScorer",
    "Outcome",
    "ScoreMethod",
    "Scorer",
    "Status",
    "WorkerPool",
    "WorkerScorer",
    "collect_score_methods",
    "component",
]
