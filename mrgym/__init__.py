"""mrgym: environments that emit several named rewards, checked.

Read in this order: components, env, text, check, sampler, rollout, score; then
``mrgym_trainers``, ``adapters`` and ``server``.
"""

from mrgym.check import check_env
from mrgym.components import ABSENT, Component, Gate, components, present_key, reward_key
from mrgym.env import MultiRewardEnv, from_gymnasium
from mrgym.errors import (
    ConfigError,
    MissingExtraError,
    MrgymError,
    RegistryError,
    RemoteError,
    RewardContractError,
    RewardDefinitionError,
    RolloutError,
    SamplerError,
    ScoreError,
    TaskError,
    WireError,
)
from mrgym.functions import from_functions, from_verifier
from mrgym.registry import list_envs, make, make_vec, register, spec
from mrgym.rollout import Rollout, run_group, run_groups
from mrgym.sampler import Completion, OpenAISampler, SamplingParams, ScriptedSampler
from mrgym.score import score_completions
from mrgym.scoring import component
from mrgym.tasks import Task, TaskSource
from mrgym.text import MultiTurnEnv, SingleTurnEnv, State

__all__ = [
    "ABSENT",
    "Completion",
    "Component",
    "ConfigError",
    "Gate",
    "MissingExtraError",
    "MrgymError",
    "MultiRewardEnv",
    "MultiTurnEnv",
    "OpenAISampler",
    "RegistryError",
    "RemoteError",
    "RewardContractError",
    "RewardDefinitionError",
    "Rollout",
    "RolloutError",
    "SamplerError",
    "SamplingParams",
    "ScoreError",
    "ScriptedSampler",
    "SingleTurnEnv",
    "State",
    "Task",
    "TaskError",
    "TaskSource",
    "WireError",
    "check_env",
    "component",
    "components",
    "from_functions",
    "from_gymnasium",
    "from_verifier",
    "list_envs",
    "make",
    "make_vec",
    "present_key",
    "register",
    "reward_key",
    "run_group",
    "run_groups",
    "score_completions",
    "spec",
]

__version__ = "0.1.0"
