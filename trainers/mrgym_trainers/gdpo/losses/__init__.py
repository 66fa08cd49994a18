"""The loss, one idea a file; :func:`policy_loss` puts them together."""

from mrgym_trainers.gdpo.losses.aggregation import Denominator, aggregate
from mrgym_trainers.gdpo.losses.kl import kl_estimate
from mrgym_trainers.gdpo.losses.mismatch import mismatch_metrics, mismatch_weight
from mrgym_trainers.gdpo.losses.objective import policy_loss
from mrgym_trainers.gdpo.losses.ratio import MAX_LOG_RATIO, importance_ratio, log_ratio
from mrgym_trainers.gdpo.losses.surrogate import Surrogate, surrogate

__all__ = [
    "MAX_LOG_RATIO",
    "Denominator",
    "Surrogate",
    "aggregate",
    "importance_ratio",
    "kl_estimate",
    "log_ratio",
    "mismatch_metrics",
    "mismatch_weight",
    "policy_loss",
    "surrogate",
]
