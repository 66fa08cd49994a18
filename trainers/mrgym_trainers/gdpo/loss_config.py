"""The configuration of the loss; ``docs/losses.md`` has formulas and sources."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from mrgym.errors import ConfigError
from mrgym_trainers.gdpo.strict import Strict

__all__ = ["LossConfig"]


class LossConfig(Strict):
    """How log-probabilities and advantages become a loss.

    Attributes:
        surrogate: ``clip`` is PPO's clipped surrogate; ``cispo`` bounds the importance ratio and
            uses it as a fixed weight of the log-probability, so no token loses its gradient.
        ratio: The importance ratio of each token, or one a rollout (GSPO): the geometric mean of
            its tokens' ratios. GSPO's clip bounds are far narrower: 3e-4 and 4e-4 in the paper.
        clip_low: The importance ratio is held above ``1 - clip_low``.
        clip_high: The importance ratio is held below ``1 + clip_high``.
        dual_clip: With a negative advantage, the surrogate is held above this many times it.
        aggregation: ``token_mean`` divides by the step's number of tokens, ``sequence_mean``
            averages within a rollout first, ``constant`` divides by rollouts x ``constant_length``.
        constant_length: That length, in tokens.
        kl_coef: Weight of the divergence from the reference policy; 0 needs no reference.
        kl: Its estimator. As losses, ``k1`` has a gradient of zero mean (it is for watching),
            ``k2`` has that of KL(policy || reference), ``k3`` that of KL(reference || policy).
        entropy_coef: Weight of the entropy bonus.
        mismatch: Correction where the sampler's log-probabilities are not the trainer's:
            ``tis`` weights tokens by their mismatch ratio up to ``tis_cap``, ``mask`` by their
            ratio within ``mask_low`` and ``mask_high`` and by 0 outside; ``auto`` is ``tis``
            unless the sampler is the trainer's own model.
        tis_cap: Largest weight.
        mask_low: Smallest mismatch ratio that counts.
        mask_high: Largest mismatch ratio that counts.
        truncated: What becomes of completions cut by the token limit: ``mask`` leaves them out
            of loss, denominator and group statistics.
    """

    surrogate: Literal["clip", "cispo"] = "clip"
    ratio: Literal["token", "sequence"] = "token"
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    clip_high: NonNegativeFloat = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    constant_length: PositiveInt = 1024
    kl_coef: NonNegativeFloat = 0.0
    kl: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: NonNegativeFloat = 0.0
    mismatch: Literal["auto", "tis", "mask", "off"] = "auto"
    tis_cap: Annotated[float, Field(ge=1)] = 2.0
    mask_low: Annotated[float, Field(ge=0, le=1)] = 0.5
    mask_high: Annotated[float, Field(gt=1)] = 5.0
    truncated: Literal["keep", "mask"] = "keep"

    @model_validator(mode="after")
    def _dual_clip_has_an_effect(self) -> Self:
        if self.dual_clip is not None and self.surrogate == "cispo":
            raise ConfigError(
                f"LossConfig: dual_clip: got {self.dual_clip} with surrogate='cispo', expected "
                "none; it bounds the ratio already, set clip_high"
            )
        return self

    def resolved(self, *, own_sampler: bool) -> Self:
        """Return the configuration with ``mismatch="auto"`` decided.

        Args:
            own_sampler: Whether completions are drawn from the trainer's own model.
        """
        if self.mismatch != "auto":
            return self
        return self.model_copy(update={"mismatch": "off" if own_sampler else "tis"})

    @property
    def needs_every_rollout(self) -> bool:
        """Whether rollouts without advantage have a gradient too: that of KL or entropy."""
        return self.kl_coef > 0 or self.entropy_coef > 0
