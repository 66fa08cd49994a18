"""What a run needs before its first step: environment, weights by name, policy, scorer, sampler."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from mrgym.env import MultiRewardEnv
from mrgym.errors import ConfigError, closest
from mrgym.registry import make
from mrgym.scoring import InlineScorer, Scorer, WorkerScorer
from mrgym.stepwise import as_text_env
from mrgym.text import TextEnv
from mrgym_trainers.advantage_constrained import constraints_of
from mrgym_trainers.advantages import AdvantageConfig
from mrgym_trainers.gdpo.config import TINY, GDPOConfig
from mrgym_trainers.gdpo.policy import Policy, load_policy
from mrgym_trainers.gdpo.ranks import Ranks
from mrgym_trainers.samplers.codec import stop_ids
from mrgym_trainers.samplers.transformers import TransformersSampler
from mrgym_trainers.tiny_policy import tiny_policy_path

__all__ = [
    "TrainableSampler",
    "load_reference",
    "load_trained",
    "make_sampler",
    "make_scorer",
    "resolve_weights",
    "text_env",
]

TrainableSampler: TypeAlias = "TransformersSampler | VLLMSampler | VLLMServerSampler"

if TYPE_CHECKING:
    from mrgym_trainers.samplers.vllm.engine import VLLMSampler
    from mrgym_trainers.samplers.vllm.server import VLLMServerSampler


def text_env(env: str | MultiRewardEnv[Any, Any], kwargs: dict[str, Any]) -> TextEnv:
    """Return an environment, given by id or as it is, in the form rollouts are drawn from.

    Raises:
        ConfigError: If it is no environment with components.
    """
    if isinstance(env, str):
        return as_text_env(partial(make, env, **kwargs))
    if isinstance(env, TextEnv):
        return env
    if not isinstance(env, MultiRewardEnv):
        raise ConfigError(
            f"GDPOTrainer: got {type(env).__name__}, expected an env id or a MultiRewardEnv; "
            "unwrap it (env.unwrapped), or use mrgym.from_gymnasium"
        )
    return as_text_env(partial(copy.deepcopy, env))


def resolve_weights(config: AdvantageConfig, env: TextEnv) -> dict[str, float]:
    """Return a weight for every component: the environment's own, overridden by name.

    Raises:
        ConfigError: If a name here, or in the constraints, is not a component's; suggests the
            nearest.
    """
    constraints_of([*env.components], config)
    given = config.weights or {}
    unknown = [name for name in given if name not in env.components]
    if unknown:
        raise ConfigError(
            f"weights: got {[*given]}, expected names among {[*env.components]} of "
            f"{env.contract_name}{closest(unknown[0], env.components)}; unknown: {unknown}"
        )
    return {**env.components.weights, **given}


def make_scorer(config: GDPOConfig) -> Scorer:
    """Return the scorer that the configuration asks for."""
    if config.scoring == "workers":
        return WorkerScorer(workers=config.score_workers, deadline=config.score_timeout)
    return InlineScorer(timeout=config.score_timeout)


def load_trained(config: GDPOConfig, ranks: Ranks | None = None) -> Policy:
    """Return the policy that is to be trained, spread over the ranks."""
    ranks = ranks or Ranks()
    torch.manual_seed(config.seed)  # an adapter begins at random, on all ranks alike
    policy = load_policy(
        config.model,
        device=_loading_device(config, ranks),
        dtype=config.dtype,
        master_weights=config.master_weights,
        gradient_checkpointing=config.gradient_checkpointing,
        compile_model=config.compile_model,
        lora=config.lora,
    )
    return _spread(policy, config, ranks)


def load_reference(
    config: GDPOConfig, ranks: Ranks | None = None, tokenizer: Any = None
) -> Policy | None:
    """Return the frozen policy of the KL term, if the loss has one, spread over the ranks.

    Raises:
        ConfigError: If its tokens are not those of the policy's tokenizer.
    """
    if config.loss.kl_coef == 0:
        return None
    ranks = ranks or Ranks()
    reference = load_policy(
        config.reference_model or config.model,
        device=_loading_device(config, ranks),
        dtype=config.dtype,
        master_weights=False,
    )
    if tokenizer is not None and reference.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"reference_model: got {reference.name!r} with another vocabulary than "
            f"{config.model!r}, expected the same tokens under the same ids; take a reference of "
            "the policy's family"
        )
    reference.model.requires_grad_(False)
    return _spread(reference, config, ranks)


def _loading_device(config: GDPOConfig, ranks: Ranks) -> str:
    """Return where a model is loaded: a GPU need never hold the whole of one that is spread."""
    return config.device if ranks.world == 1 else "cpu"


def _spread(policy: Policy, config: GDPOConfig, ranks: Ranks) -> Policy:
    if ranks.world == 1:
        return policy
    from mrgym_trainers.gdpo.sharding import shard

    return shard(policy, ranks.world, ranks.device(config.device))


def make_sampler(
    config: GDPOConfig, policy: Policy, ranks: Ranks | None = None
) -> TrainableSampler:
    """Return the sampler that the configuration asks for.

    On many ranks each has a model or an engine of its own to sample from, whole; or all of them
    share servers, which the first one sends weights to.

    Raises:
        ConfigError: If it cannot be started.
        SamplerError: If a server does not fit the policy.
    """
    ranks = ranks or Ranks()
    if config.sampler == "transformers":
        return TransformersSampler(
            policy.model if ranks.world == 1 else _copy(config, ranks),
            policy.tokenizer,
            max_rows=config.sample_rows,
            seed=config.seed,
            autocast=partial(policy.autocast, cache=True),
        )
    ends = stop_ids(policy.model, policy.tokenizer)
    options: dict[str, Any] = {"config": config.vllm, "dtype": config.dtype, "seed": config.seed}
    model = str(tiny_policy_path()) if policy.name == TINY else policy.name
    if config.vllm.servers:
        from mrgym_trainers.samplers.vllm.server import VLLMServerSampler

        options["sends_weights"] = ranks.first
        return VLLMServerSampler(model, policy.tokenizer, ends, **options)
    from mrgym_trainers.samplers.vllm.engine import VLLMSampler

    with ranks.alone(config.vllm.tensor_parallel_size):
        return VLLMSampler(model, policy.tokenizer, ends, **options)


def _copy(config: GDPOConfig, ranks: Ranks) -> Any:
    """Return a whole model to sample from; one gathered for every token would be far slower."""
    copied = load_policy(
        config.model,
        device=ranks.device(config.device),
        dtype=config.dtype,
        master_weights=config.master_weights,
    )
    return copied.model.requires_grad_(False)
