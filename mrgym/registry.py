"""Finding environments by id: ``make``, ``make_vec``, ``register``, ``spec``, ``list_envs``.

An id is ``name-vN``; ``name`` alone means its newest version. Installed packages add environments
with an entry point in the group ``mrgym.envs``; anything importable is reached as
``"pkg.module:Class"``. Nothing is ever installed on demand.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import entry_points
from typing import Any, Literal, TypeAlias

import gymnasium as gym

from mrgym.env import MultiRewardEnv
from mrgym.errors import ConfigError, RegistryError, closest

__all__ = ["EnvSpec", "list_envs", "make", "make_vec", "register", "spec"]

ENTRY_POINT_GROUP = "mrgym.envs"
AnyEnv: TypeAlias = MultiRewardEnv[Any, Any]
EntryPoint: TypeAlias = "str | Callable[..., AnyEnv]"

_ID = re.compile(r"(?:(?P<namespace>[\w.-]+)/)?(?P<name>[A-Za-z]\w*)(?:-v(?P<version>\d+))?")


@dataclass(frozen=True)
class EnvSpec:
    """What the registry knows of an environment.

    Attributes:
        id: Its id with the version.
        entry_point: ``"pkg.module:Class"`` or a callable that makes it.
        kwargs: Arguments it is made with unless ``make`` overrides them.
    """

    id: str
    entry_point: EntryPoint
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def location(self) -> str:
        """Where the environment comes from, as text."""
        if isinstance(self.entry_point, str):
            return self.entry_point
        maker: Any = self.entry_point
        while isinstance(maker, partial):
            maker = maker.func
        return f"{maker.__module__}:{getattr(maker, '__qualname__', type(maker).__qualname__)}"


_registered: dict[str, EnvSpec] = {}


def register(env_id: str, entry_point: EntryPoint, **kwargs: Any) -> EnvSpec:
    """Register an environment for this process and return its spec.

    Args:
        env_id: ``name`` (taken as ``name-v1``) or ``name-vN``, with an optional ``namespace/``.
        entry_point: ``"pkg.module:Class"``, a class, or a function that makes the environment.
        **kwargs: Default arguments of the environment.

    Raises:
        RegistryError: If the id is malformed, taken, or shadows an installed module.
    """
    full_id = _full_id(env_id)
    taken = _known().get(full_id)
    new = EnvSpec(full_id, entry_point, kwargs)
    if taken is not None:
        raise RegistryError(
            f"register: got id {full_id!r}, already taken by {taken.location}, expected a new one; "
            "choose another name or raise the version"
        )
    _check_shadowing(full_id, new)
    _registered[full_id] = new
    return new


def spec(env_id: str) -> EnvSpec:
    """Return the spec of an id, of ``"pkg.module:Class"``, or of a service's address.

    Raises:
        RegistryError: If the id is unknown; suggests the nearest one.
    """
    if "://" in env_id:  # of another scheme too: connecting refuses it by its name
        return EnvSpec(env_id, "mrgym.remote:connect", {"url": env_id})
    if ":" in env_id:
        return EnvSpec(env_id, env_id)
    known = _known()
    full_id = _newest(env_id, known) if not re.search(r"-v\d+$", env_id) else env_id
    if full_id not in known:
        raise RegistryError(
            f"make: got unknown environment {env_id!r}, expected one of {sorted(known)}"
            f"{closest(env_id, [*known, *(_bare(i) for i in known)])}; "
            "register it, or name a class as 'pkg.module:Class'"
        )
    return known[full_id]


def list_envs() -> list[str]:
    """Return every known id, with versions, in order."""
    return sorted(_known())


def make(env_id: str, /, **kwargs: Any) -> AnyEnv:
    """Return a new environment.

    Args:
        env_id: A registered id, ``"pkg.module:Class"``, or ``"http://host:port"`` of a service.
        **kwargs: Arguments of the environment; of a service ``token``, ``timeout``, ``retries``,
            ``format``, ``tasks``, ``eval_tasks`` (see :func:`mrgym.remote.connect`).

    Raises:
        RegistryError: If it is unknown, cannot be imported, refuses an argument, or is no
            ``MultiRewardEnv``; for an address of another kind, ConfigError.
    """
    return _build(spec(env_id), kwargs)


def make_vec(
    env_id: str,
    /,
    num_envs: int = 1,
    *,
    mode: Literal["sync", "async"] = "sync",
    vector_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> gym.vector.VectorEnv[Any, Any, Any]:
    """Return a Gymnasium vector environment; ``infos["reward_components"]`` holds arrays by name.

    Args:
        env_id: A registered id, or ``"pkg.module:Class"``.
        num_envs: Number of environments.
        mode: ``"sync"`` (one process) or ``"async"`` (one process an environment).
        vector_kwargs: Further arguments of the vector environment.
        **kwargs: Arguments of every environment.

    Raises:
        RegistryError: As :func:`make`.
        ConfigError: If ``mode`` is unknown.
    """
    if mode not in ("sync", "async"):
        raise ConfigError(
            f"make_vec: got mode={mode!r}, expected 'sync' or 'async'; name one of them"
        )
    makers = [partial(_build, spec(env_id), kwargs) for _ in range(num_envs)]
    vector = gym.vector.AsyncVectorEnv if mode == "async" else gym.vector.SyncVectorEnv
    return vector(makers, **(vector_kwargs or {}))


def _build(env_spec: EnvSpec, overrides: dict[str, Any]) -> AnyEnv:
    kwargs = {**env_spec.kwargs, **overrides}
    entry = env_spec.entry_point
    creator = _load(entry) if isinstance(entry, str) else entry
    _check_arguments(env_spec.id, creator, kwargs)
    env = creator(**kwargs)
    if not isinstance(env, MultiRewardEnv):
        raise RegistryError(
            f"{env_spec.id}: got {type(env).__name__}, expected a MultiRewardEnv; {_remedy(env)}"
        )
    if ":" not in env_spec.id:
        env.spec = gym.envs.registration.EnvSpec(
            env_spec.id, entry_point=env_spec.location, kwargs=kwargs
        )
    return env


def _remedy(made: object) -> str:
    if not isinstance(made, gym.Env):
        return "subclass mrgym.MultiRewardEnv"
    if isinstance(made.unwrapped, MultiRewardEnv):
        return f"make the bare {type(made.unwrapped).__name__} and wrap it after make(...)"
    return "wrap it with mrgym.from_gymnasium(env)"


def _load(path: str) -> Callable[..., AnyEnv]:
    module_name, _, attribute = path.partition(":")
    target = _import(module_name, path)
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise RegistryError(
                f"make: got {path!r}, expected {module_name!r} to define {attribute!r}"
                f"{closest(part, dir(target))}; check the class name"
            )
        target = getattr(target, part)
    if not callable(target):
        raise RegistryError(
            f"make: got {path!r} ({type(target).__name__}), expected a class or function that "
            "makes an environment; name one"
        )
    return target  # type: ignore[no-any-return]


def _import(module_name: str, path: str) -> Any:
    cause: ModuleNotFoundError | None = None
    if module_name and not module_name.startswith("."):
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or module_name
            if not (module_name == missing or module_name.startswith(missing + ".")):
                raise  # the module is there but something it imports is not
            cause = error
    raise RegistryError(
        f"make: got {path!r}, expected an importable module {module_name!r}; "
        "check the name and that it is installed or in the working directory"
    ) from cause


def _check_arguments(env_id: str, creator: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(creator)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        accepted = [name for name in signature.parameters if name not in ("args", "kwargs")]
        unknown = next((name for name in kwargs if name not in signature.parameters), "")
        raise RegistryError(
            f"{env_id}: got arguments {[*kwargs]} ({error}), expected some of {accepted}"
            f"{closest(unknown, accepted) if unknown else ''}; change the arguments"
        ) from error


def _known() -> dict[str, EnvSpec]:
    return {**_installed(), **_registered}


@cache
def _installed() -> dict[str, EnvSpec]:
    """Return what installed packages declare; one that cannot be used is left out, aloud."""
    found: dict[str, EnvSpec] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            new = EnvSpec(_full_id(point.name), point.value)
            _check_shadowing(new.id, new)
        except RegistryError as error:
            warnings.warn(f"entry point {point.name!r} is left out: {error}", stacklevel=2)
            continue
        other = found.setdefault(new.id, new)
        if other.entry_point != new.entry_point:
            found[new.id] = EnvSpec(new.id, _Ambiguous(new.id, other.location, new.location))
    return found


class _Ambiguous:
    """Stands for an id that two installed packages claim; only making that id fails."""

    __module__ = "ambiguous"

    def __init__(self, env_id: str, *locations: str) -> None:
        self.__qualname__ = " and ".join(locations)
        self._env_id = env_id

    def __call__(self) -> AnyEnv:
        raise RegistryError(
            f"make: got id {self._env_id!r} from installed packages twice ({self.__qualname__}), "
            "expected one; uninstall one of them, or name the class as 'pkg.module:Class'"
        )


def _full_id(env_id: str) -> str:
    match = _ID.fullmatch(env_id)
    if match is None:
        raise RegistryError(
            f"register: got id {env_id!r}, expected 'name' or 'name-vN' (optionally "
            "'namespace/name-vN') of letters, digits and '_'; rename it"
        )
    return env_id if match["version"] else f"{env_id}-v1"


def _bare(full_id: str) -> str:
    return re.sub(r"-v\d+$", "", full_id)


def _newest(name: str, known: dict[str, EnvSpec]) -> str:
    versions = [int(i.rsplit("-v", 1)[1]) for i in known if _bare(i) == name]
    return f"{name}-v{max(versions, default=1)}"


def _check_shadowing(full_id: str, new: EnvSpec) -> None:
    name = _bare(full_id)
    if "/" in name or new.location.split(":")[0].split(".")[0] == name:
        return  # an environment may carry the name of the very module that defines it
    module = importlib.util.find_spec(name)
    if module is not None and module.origin is not None:  # without one it is just a folder
        raise RegistryError(
            f"register: got id {full_id!r}, which shadows the installed module {name!r} "
            f"({module.origin}), expected a name of its own; rename it or use a namespace"
        )
