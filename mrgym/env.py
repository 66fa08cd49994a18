"""MultiRewardEnv: a Gymnasium environment whose reward is the checked sum of named components."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sized
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, SupportsFloat, TypeVar

import gymnasium as gym

from mrgym.components import (
    SUM_ABS_TOL,
    SUM_REL_TOL,
    Component,
    ComponentSet,
    RewardVector,
    as_score,
)
from mrgym.errors import RewardContractError, RewardDefinitionError

__all__ = ["MultiRewardEnv", "from_gymnasium"]

ObsT = TypeVar("ObsT")
ActT = TypeVar("ActT")
StepResult = tuple[ObsT, float, bool, bool, dict[str, Any]]


class MultiRewardEnv(gym.Env[ObsT, ActT], Generic[ObsT, ActT]):
    """A ``gymnasium.Env`` with the reward contract.

    After every ``step``, ``info["reward_components"]`` is a plain ``dict[str, float]`` over exactly
    the declared names (an optional component that abstained has its key left out) and
    ``reward == math.fsum(info["reward_components"].values())``. Ungated scores are kept in
    ``info["raw_components"]`` where a gate is declared.

    Subclasses set ``components`` (on the class, or on the instance in ``__init__``), both spaces,
    ``reset`` and ``step``. :meth:`emit` builds a step that keeps the contract; a step that builds
    its tuple by hand is checked all the same, whichever class of the hierarchy defines it.

    Raises:
        RewardContractError: From ``step``, naming environment, component, got and expected.
    """

    components: ComponentSet

    _range_holds_each_step: ClassVar[bool] = True
    _inside_step: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        declared = cls.__dict__.get("components")
        if isinstance(declared, Mapping) and not isinstance(declared, ComponentSet):
            cls.components = ComponentSet(declared)
        _guard_class(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Guard ``step`` again: a mixin may have hidden the class, or somebody replaced it."""
        _guard_class(cls)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "step":
            given = value
            value = MethodType(_guarded(lambda _, *args, **kwargs: given(*args, **kwargs)), self)
        super().__setattr__(name, value)

    @property
    def contract_name(self) -> str:
        """How this environment is called in error messages: its id, else its class."""
        return self.spec.id if self.spec is not None else type(self).__qualname__

    if TYPE_CHECKING:

        def step(self, action: ActT) -> StepResult[ObsT]:
            """Run one step; the result is checked against the contract."""
            ...

    def emit(
        self,
        observation: ObsT,
        scores: Mapping[str, object],
        *,
        terminated: bool = False,
        truncated: bool = False,
        info: Mapping[str, Any] | None = None,
    ) -> StepResult[ObsT]:
        """Return the five-tuple of ``step`` with gates applied, components checked and summed.

        Args:
            observation: Next observation.
            scores: Score by component name; a number, a bool, or ``mrgym.ABSENT``.
            terminated: Whether the task ended the episode.
            truncated: Whether a limit ended it.
            info: Further entries for ``info``.

        Raises:
            RewardContractError: If ``scores`` do not match the declaration.
        """
        declared = self._declared()
        vector = declared.score(scores, subject=self.contract_name)
        out = dict(info) if info else {}
        out.update(reward_info(declared, vector))
        return observation, vector.reward, terminated, truncated, out

    def _declared(self) -> ComponentSet:
        declared = getattr(self, "components", None)
        if declared.__class__ is ComponentSet:
            return declared
        if isinstance(declared, Mapping):
            declared = ComponentSet(declared)
            with contextlib.suppress(AttributeError):  # a property has no setter
                self.components = declared
            return declared
        raise RewardDefinitionError(
            f"{self.contract_name}: got components={declared!r}, expected a declaration; "
            "set components = mrgym.components(name=mrgym.Component(...)) on the class"
        )


def reward_info(declared: ComponentSet, vector: RewardVector) -> dict[str, Any]:
    """Return the entries of ``info`` that carry checked scores."""
    out: dict[str, Any] = {"reward_components": vector.values}
    if declared.has_gates:
        out["raw_components"] = vector.raw
    return out


def _guard_class(cls: type[MultiRewardEnv[Any, Any]]) -> None:
    # The lookup goes through the MRO, so a step that comes from a mixin is guarded as well.
    step = cls.step
    if step is not gym.Env.step and not _is_guarded(step):
        cls.step = _guarded(step)  # type: ignore[method-assign]


def _guarded(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``step`` so that what it returns is checked, once, at the outermost call."""

    @functools.wraps(step)
    def checked_step(self: MultiRewardEnv[Any, Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside_step:  # a call of super().step(): the outer guard looks at the result
            return step(self, *args, **kwargs)
        own = self.__dict__
        own["_inside_step"] = True
        try:
            result = step(self, *args, **kwargs)
        finally:
            own["_inside_step"] = False
        return _check_result(self, result)

    checked_step.__mrgym_guarded__ = checked_step  # type: ignore[attr-defined]
    return checked_step


def _is_guarded(step: Callable[..., Any]) -> bool:
    """Return whether ``step`` itself is a guard; functools.wraps copies a guard's attributes."""
    return getattr(step, "__mrgym_guarded__", None) is step


def _check_result(env: MultiRewardEnv[Any, Any], result: Any) -> StepResult[Any]:
    name = env.contract_name
    if not isinstance(result, tuple) or len(result) != 5 or not isinstance(result[4], dict):
        raise RewardContractError(
            f"{name}: step returned {type(result).__name__} of {_length(result)}, expected "
            "(observation, reward, terminated, truncated, info dict); use self.emit(...)"
        )
    observation, reward, terminated, truncated, info = result
    declared = env._declared()
    if "reward_components" not in info or not isinstance(info["reward_components"], dict):
        raise RewardContractError(
            f"{name}: got no dict info['reward_components'], expected one over "
            f"{[*declared]}; use self.emit(...)"
        )
    values = declared.check(
        info["reward_components"],
        subject=name,
        check_range=env._range_holds_each_step or bool(terminated or truncated),
    )
    total = math.fsum(values.values())
    return (
        observation,
        _checked_sum(reward, total, values, name),
        bool(terminated),
        bool(truncated),
        {**info, "reward_components": values},
    )


def _checked_sum(
    reward: SupportsFloat | None, total: float, values: dict[str, float], name: str
) -> float:
    """Return the exact sum after checking that the env's own ``reward`` agrees with it."""
    if reward.__class__ is float and reward == total:
        return total
    try:
        got = as_score(reward, "reward", name)
    except RewardContractError:
        got = math.nan
    if not math.isclose(got, total, rel_tol=SUM_REL_TOL, abs_tol=SUM_ABS_TOL):
        raise RewardContractError(
            f"{name}: got reward={reward!r}, expected {total!r}, the sum of {values}; "
            "return the sum, or make whatever was added a component of its own"
        )
    return total


def _length(result: object) -> str:
    return f"{len(result)} items" if isinstance(result, Sized) else "no length"


class _SingleRewardEnv(MultiRewardEnv[ObsT, ActT]):
    """A plain Gymnasium environment seen as one with a single component."""

    def __init__(self, env: gym.Env[ObsT, ActT], name: str, component: Component) -> None:
        self.components = ComponentSet({name: component})
        self.env = env
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self.metadata = env.metadata
        self.render_mode = env.render_mode
        self.spec = env.spec
        self._name = name

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ObsT, dict[str, Any]]:
        super().reset(seed=seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: ActT) -> StepResult[ObsT]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self.emit(
            observation, {self._name: reward}, terminated=terminated, truncated=truncated, info=info
        )

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()


def from_gymnasium(
    env: gym.Env[ObsT, ActT], *, name: str = "reward", component: Component | None = None
) -> MultiRewardEnv[ObsT, ActT]:
    """Return ``env`` as a :class:`MultiRewardEnv` whose one component is its scalar reward.

    Args:
        env: Any Gymnasium environment.
        name: Name of the component.
        component: Its declaration; by default unbounded and summed over the episode.

    Raises:
        RewardDefinitionError: If ``env`` declares components already.
    """
    if isinstance(env.unwrapped, MultiRewardEnv):
        raise RewardDefinitionError(
            f"from_gymnasium: got {env.unwrapped.contract_name!r}, which declares components, "
            "expected a plain Gymnasium env; use it as it is"
        )
    return _SingleRewardEnv(env, name, component or Component(reduce="sum"))
