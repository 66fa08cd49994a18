"""The trainer's configuration: every key, its default, and the checks before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from mrgym.errors import ConfigError
from mrgym_trainers.advantage_config import AdvantageConfig, config_error

__all__ = ["TINY", "GDPOConfig", "LossConfig", "load_config"]

TINY: Final = "tiny"
"""The model name that stands for the policy in the package."""

# What suits the bundled policy of 0.4M parameters; any key can be overridden.
_TINY_DEFAULTS: Final[Mapping[str, Any]] = {
    "learning_rate": 2e-4,
    "max_completion_tokens": 36,
    "steps": 250,
    "prompts_per_step": 32,
    "eval_tasks": 512,
    "micro_batch_tokens": 65_536,
}
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Beta: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
_SHORTHANDS: Final = ("estimator", "weights")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    if not TYPE_CHECKING:  # type checkers keep the signature made from the fields

        def __init__(self, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise config_error(type(self), error) from None


class LossConfig(_Strict):
    """The clipped surrogate.

    Attributes:
        clip_low: The importance ratio is held above ``1 - clip_low``.
        clip_high: The importance ratio is held below ``1 + clip_high``.
        aggregation: ``token_mean`` divides by the step's number of tokens, ``sequence_mean``
            averages within a rollout first, ``constant`` divides by rollouts x ``constant_length``.
        constant_length: That length, in tokens.
        truncated: What becomes of completions cut by the token limit: ``mask`` leaves them out
            of loss, denominator and group statistics.
    """

    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    clip_high: NonNegativeFloat = 0.28
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    constant_length: PositiveInt = 1024
    truncated: Literal["keep", "mask"] = "keep"


class GDPOConfig(_Strict):
    """Everything a run is made of. ``estimator=`` and ``weights=`` are short for ``advantage``'s.

    Where the model is the bundled ``"tiny"``, keys left out are filled with values that suit it.

    Attributes:
        model: ``"tiny"``, a folder, or a hub id of a causal language model.
        seed: Seeds tasks, sampling and evaluation.
        steps: Number of optimiser batches.
        prompts_per_step: Groups a step.
        group_size: Rollouts a group.
        max_completion_tokens: Most tokens of one completion.
        temperature: Sampling temperature, applied in the loss as well.
        updates_per_step: Passes over a step's rollouts.
        learning_rate: Peak of the schedule.
        lr_schedule: ``cosine`` or ``linear`` decay to ``lr_end`` x ``learning_rate``, or none.
        lr_end: Final share of the learning rate.
        warmup_steps: Steps of linear warm-up.
        adam_betas: AdamW's momentum terms.
        weight_decay: AdamW's decay.
        max_grad_norm: Gradient norm is clipped to this.
        micro_batch_tokens: Most tokens (padding included) of one forward pass.
        sample_rows: Most completions sampled at a time.
        dtype: Precision of the weights.
        device: ``auto`` takes CUDA if there is one.
        advantage: How scores become advantages; weights left out are the environment's own.
        loss: The clipped surrogate.
        on_score_error: What becomes of a rollout whose scoring failed.
        max_error_rate: A step with a larger share of failed rollouts stops the run.
        scoring: Where score functions run: in this process or in worker processes.
        score_timeout: Seconds a score function may take (synchronous ones: workers only).
        score_workers: Number of worker processes.
        shuffle_rewards: Control: hand every rollout another one's scores, so nothing can be
            learned from them.
        eval_every: Steps between evaluations on held-out tasks (always before and after).
        eval_tasks: Held-out tasks of an evaluation.
        checkpoint_every: Steps between checkpoints; 0 writes only the last.
        rollouts_every: Steps between stored rollouts (first and last always).
    """

    model: str = TINY
    seed: NonNegativeInt = 0
    steps: PositiveInt = 200
    prompts_per_step: PositiveInt = 16
    group_size: Annotated[int, Field(ge=2)] = 8
    max_completion_tokens: PositiveInt = 256
    temperature: PositiveFloat = 1.0
    updates_per_step: PositiveInt = 1
    learning_rate: PositiveFloat = 1e-6
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    lr_end: Share = 0.05
    warmup_steps: NonNegativeInt = 0
    adam_betas: tuple[Beta, Beta] = (0.9, 0.99)
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    micro_batch_tokens: PositiveInt = 4096
    sample_rows: PositiveInt = 256
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    on_score_error: Literal["mask", "raise", "floor"] = "mask"
    max_error_rate: Share = 0.1
    scoring: Literal["inline", "workers"] = "inline"
    score_timeout: PositiveFloat = 60.0
    score_workers: PositiveInt = 1
    shuffle_rewards: bool = False
    eval_every: PositiveInt = 50
    eval_tasks: PositiveInt = 128
    checkpoint_every: NonNegativeInt = 0
    rollouts_every: PositiveInt = 50

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        data = _expand_shorthands(dict(data))
        return {**_TINY_DEFAULTS, **data} if data.get("model", TINY) == TINY else data

    @field_validator("group_size", mode="before")
    @classmethod
    def _no_singletons(cls, value: Any) -> Any:
        if value == 1:
            raise ConfigError(
                "GDPOConfig: group_size: got 1, expected at least 2; a group of one has no "
                "advantage (nothing to compare with)"
            )
        return value

    def to_yaml(self) -> str:
        """Return the configuration as YAML: every key, of ``advantage`` those that were given.

        An estimator implies some of its options, so writing them all down would tie the file to
        the estimator it was written with.
        """
        data = self.model_dump(mode="json")
        given = self.advantage.model_dump(mode="json", exclude_unset=True)
        data["advantage"] = {"estimator": self.advantage.estimator, **given}
        return yaml.safe_dump(data, sort_keys=False)


def load_config(
    path: str | Path | None = None, overrides: Sequence[str] = (), **given: Any
) -> GDPOConfig:
    """Return the configuration of a YAML file, changed by ``key=value`` overrides.

    Args:
        path: YAML file of a mapping; defaults only, if left out. The ``config.yaml`` of a run
            can be used as it is: its ``env`` is no key of the configuration and is passed over.
        overrides: Such as ``"steps=50"`` or ``"advantage.weights.format=0.5"``; values are YAML.
        **given: Keys that win over the file and lose against ``overrides``.

    Raises:
        ConfigError: If the file is not a mapping, an override has no ``=``, or a key is unknown.
    """
    data = _read_yaml(Path(path)) if path is not None else {}
    data.pop("env", None)
    data.update({key: value for key, value in given.items() if value is not None})
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"override: got {override!r}, expected key=value; write e.g. steps=50"
            )
        keys = key.strip().split(".")
        if keys[0] in _SHORTHANDS and keys[0] not in data:
            keys = ["advantage", *keys]  # so that it wins over the file's own
        _set(data, keys, _yaml_value(override, text))
    return GDPOConfig(**data)


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path}: got no file, expected a YAML configuration; check the path")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: got no valid YAML ({reason}), expected a mapping") from error
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(
            f"{path}: got {type(data).__name__}, expected a mapping of keys; write 'steps: 50'"
        )
    return data


def _yaml_value(override: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override: got {override!r}, expected a YAML value after '='") from error


def _set(data: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        inner = data.get(key)
        data[key] = dict(inner) if isinstance(inner, Mapping) else {}
        data = data[key]
    data[keys[-1]] = value


def _expand_shorthands(data: dict[str, Any]) -> dict[str, Any]:
    short = {key: data.pop(key) for key in _SHORTHANDS if key in data}
    if not short:
        return data
    advantage = data.get("advantage", {})
    if isinstance(advantage, AdvantageConfig):
        advantage = advantage.model_dump(exclude_unset=True)
    if not isinstance(advantage, Mapping):
        raise ConfigError(
            f"GDPOConfig: advantage: got {advantage!r}, expected a mapping of keys; "
            "write advantage: {group_eps: 1.0e-4}, or leave it out"
        )
    twice = [key for key in short if key in advantage]
    if twice:
        raise ConfigError(
            f"GDPOConfig: got {twice} both at the top and under 'advantage', expected one place; "
            "remove one"
        )
    return {**data, "advantage": {**advantage, **short}}
