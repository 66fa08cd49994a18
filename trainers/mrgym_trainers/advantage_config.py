"""The configuration of advantages, and presets that reproduce other libraries' figures."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from mrgym.errors import ConfigError, closest
from mrgym_trainers.advantage_estimators import BUILT_IN, ESTIMATORS

__all__ = ["PRESETS", "AdvantageConfig", "Constraint", "config_error"]

Epsilon = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(allow_inf_nan=False)]

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "default": {},
        "trl": {"missing": "nan", "float32_factors": True},
        "nemo_rl": {
            "group_eps": 1e-6,
            "batch_eps": 0.0,
            "leave_one_out_std": "others",
            "missing": "zero",
        },
        "verl": {
            "group_eps": 1e-6,
            "batch_eps": 1e-8,
            "batch_eps_in_root": True,
            "whiten": "token",
            "missing": "error",
        },
    }
)
"""Options that reproduce TRL 1.16.0, NeMo-RL 7ea279abf and verl 0.9.1; the rest are defaults."""

# What an estimator's name stands for. Whitening after one of these is a choice, no contradiction,
# except for mo_grpo, which is gdpo without it.
_IMPLIED: Final[Mapping[str, Mapping[str, Any]]] = {
    "grpo": {"whiten": "none"},
    "mo_grpo": {"whiten": "none"},
    "rloo": {"whiten": "none", "baseline": "leave_one_out", "scale": False},
    "dr_grpo": {"whiten": "none", "baseline": "mean", "scale": False},
    "dvao": {"whiten": "none", "scale": True},
    "lagrangian": {"whiten": "none"},
}

# Options only one of the built-in estimators reads; a registered one may read any.
_READ_BY: Final[Mapping[str, str]] = {"min_agreement": "gd2po", "constraints": "lagrangian"}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    if not TYPE_CHECKING:  # type checkers keep the signature made from the fields

        def __init__(self, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise config_error(type(self), error) from None


class Constraint(_Strict):
    """A share of rollouts that must reach a score, for ``estimator="lagrangian"``.

    Attributes:
        at_least: Share of the rollouts that must satisfy the constraint.
        satisfied_from: A rollout satisfies it with a score of at least this.
        learning_rate: Step of the multiplier for a share that is off by 1.
        start: The multiplier of the first batch; 1 is the weight a component has by default.
        limit: Largest multiplier, so that a constraint out of reach does not drown the rest.
    """

    at_least: Annotated[float, Field(gt=0, le=1)]
    satisfied_from: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    start: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    limit: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0

    @model_validator(mode="after")
    def _start_within_limit(self) -> Self:
        if self.start > self.limit:
            raise ConfigError(
                f"Constraint: start: got {self.start:g}, expected at most limit={self.limit:g}; "
                "lower start or raise limit"
            )
        return self


class AdvantageConfig(_Strict):
    """How scores become advantages. The defaults are GDPO as arXiv 2601.05242 describes it.

    Attributes:
        estimator: ``gdpo``, ``grpo``, ``rloo``, ``dr_grpo``, ``mo_grpo``, ``dvao``, ``gd2po``,
            ``lagrangian`` or a registered name.
        weights: Component name to weight, exactly the batch's names; None means 1 each.
        group_eps: Added to the std of a component within its group, in units of the score.
        batch_eps: Added to the std of the batch in whitening.
        batch_eps_in_root: Add ``batch_eps`` to the variance, inside the root, instead.
        baseline: What is subtracted: the group's mean, or the mean of the other rollouts.
        leave_one_out_std: With that baseline divide by the group's std (bounded, unchanged by the
            score's unit), or by the std over the others, and not at all where they are constant.
        scale: Divide by the std at all.
        whiten: Whiten the batch counting each rollout once, or once a token, or not at all.
        whiten_over: ``informative`` leaves groups without signal out of mean and std.
        missing: An absent score is left out (``abstain``), and so is a NaN (``nan``), or it
            counts as 0 (``zero``), or it is an error.
        allow_singletons: Accept a batch of nothing but groups of one, as in evaluation.
        float32_factors: Round the weights and n/(n-1) to float32, as TRL does.
        min_agreement: ``gd2po`` leaves out a rollout whose component advantages differ in sign and
            add up to less than this share of their sizes; 1 leaves out every such rollout.
        constraints: Component name to its constraint, for ``lagrangian``.
    """

    estimator: str = "gdpo"
    weights: dict[str, Weight] | None = None
    group_eps: Epsilon = 1e-4
    batch_eps: Epsilon = 1e-4
    batch_eps_in_root: bool = False
    baseline: Literal["mean", "leave_one_out"] = "mean"
    leave_one_out_std: Literal["group", "others"] = "group"
    scale: bool = True
    whiten: Literal["rollout", "token", "none"] = "rollout"
    whiten_over: Literal["all", "informative"] = "all"
    missing: Literal["abstain", "nan", "zero", "error"] = "abstain"
    allow_singletons: bool = False
    float32_factors: bool = False
    min_agreement: Annotated[float, Field(ge=0, le=1)] = 0.8
    constraints: dict[str, Constraint] | None = None

    @field_validator("estimator")
    @classmethod
    def _known_estimator(cls, name: str) -> str:
        if name not in ESTIMATORS:
            raise ConfigError(
                f"AdvantageConfig: estimator: got {name!r}, expected one of {sorted(ESTIMATORS)}"
                + (closest(name, ESTIMATORS) or "; add your own with register_estimator")
            )
        return name

    @field_validator("weights", mode="before")
    @classmethod
    def _weights_by_name(cls, weights: object) -> object:
        if weights is not None and not isinstance(weights, Mapping):
            raise ConfigError(
                f"AdvantageConfig: weights: got {weights!r}, expected a mapping by name; "
                "write {'<component>': <weight>, ...}, positions would shift with a new component"
            )
        return dict(weights) if weights is not None else None

    @field_validator("constraints", mode="before")
    @classmethod
    def _constraints_by_name(cls, constraints: object) -> object:
        if constraints is not None and not isinstance(constraints, Mapping):
            raise ConfigError(
                f"AdvantageConfig: constraints: got {constraints!r}, expected a mapping by name; "
                "write {'<component>': {'at_least': <share of rollouts>}}"
            )
        return dict(constraints) if constraints is not None else None

    @model_validator(mode="after")
    def _options_are_read(self) -> Self:
        for field, reader in _READ_BY.items():
            value = getattr(self, field)
            unread = self.estimator in BUILT_IN and self.estimator != reader
            if unread and value != type(self).model_fields[field].default:
                raise ConfigError(
                    f"AdvantageConfig: {field}: got {value!r}, expected none for estimator "
                    f"{self.estimator!r}, which does not read it; take estimator={reader!r}"
                )
        if self.estimator == "lagrangian" and not self.constraints:
            raise ConfigError(
                "AdvantageConfig: constraints: got none, expected at least one for estimator "
                "'lagrangian'; write {'<component>': {'at_least': <share of rollouts>}}"
            )
        return self

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for field, value in _IMPLIED.get(self.estimator, {}).items():
            if field not in self.model_fields_set:
                # Past the frozen setter, so that the field still counts as not given.
                object.__setattr__(self, field, value)
            elif getattr(self, field) != value and (
                field != "whiten" or self.estimator == "mo_grpo"
            ):
                raise ConfigError(
                    f"AdvantageConfig: {field}: got {getattr(self, field)!r}, expected {value!r} "
                    f"for estimator {self.estimator!r}; leave it out or take another estimator"
                )
        return self

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """Return the options that reproduce a library: ``default``, ``trl``, ``nemo_rl``, ``verl``.

        Args:
            name: The preset.
            **overrides: Fields of this class; they win over the preset.

        Raises:
            ConfigError: The preset or a field is unknown, or a value cannot work.
        """
        if name not in PRESETS:
            raise ConfigError(
                f"AdvantageConfig.preset: got {name!r}, expected one of {sorted(PRESETS)}"
                + closest(name, PRESETS)
            )
        implied = _IMPLIED.get(overrides.get("estimator", "gdpo"), {})
        options = {key: value for key, value in PRESETS[name].items() if key not in implied}
        return cls(**{**options, **overrides})


def config_error(model: type[BaseModel], error: ValidationError) -> ConfigError:
    """Return the first problem pydantic found in a model as one line: subject, got, expected."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return ConfigError(str(cause))
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        hint = closest(where, model.model_fields) or f"; known keys: {sorted(model.model_fields)}"
        return ConfigError(f"{model.__name__}: unknown key {where!r}{hint}")
    expected = first["msg"].replace("Input should be", "expected")
    return ConfigError(f"{model.__name__}: {where}: got {first['input']!r}, {expected}")
