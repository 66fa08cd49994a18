"""The trainer's configuration: every key, its default, and the checks before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

import yaml
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from mrgym.errors import ConfigError
from mrgym_trainers.advantage_config import AdvantageConfig
from mrgym_trainers.gdpo.lora_config import LoRAConfig
from mrgym_trainers.gdpo.loss_config import LossConfig
from mrgym_trainers.gdpo.strict import Strict
from mrgym_trainers.recipes import RUN_KEYS, config_path
from mrgym_trainers.samplers.vllm.settings import VLLMConfig

__all__ = [
    "TINY",
    "GDPOConfig",
    "LossConfig",
    "ProbeConfig",
    "VLLMConfig",
    "load_config",
    "load_run_keys",
]

TINY: Final = "tiny"
"""The model name that stands for the policy in the package."""

# What suits the bundled policy of 0.4M parameters; any key can be overridden.
_TINY_DEFAULTS: Final[Mapping[str, Any]] = {
    "learning_rate": 2e-4,
    "max_completion_tokens": 36,
    "steps": 250,
    "prompts_per_step": 32,
    "eval_tasks": 512,
}
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Beta: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
_SHORTHANDS: Final = ("estimator", "weights")


class ProbeConfig(Strict):
    """The check after every weight sync: do engine and policy give the same log-probabilities?

    Attributes:
        completions: Fresh completions compared; 0 turns the probe off.
        tokens: Most tokens of each.
        threshold: Largest difference of a token that is accepted; 1e-3 in float32 and 0.5 in
            bfloat16 if left out.
    """

    completions: NonNegativeInt = 4
    tokens: PositiveInt = 8
    threshold: PositiveFloat | None = None

    def limit(self, dtype: str) -> float:
        """Return the threshold that holds for a precision."""
        if self.threshold is not None:
            return self.threshold
        return 1e-3 if dtype == "float32" else 0.5


class GDPOConfig(Strict):
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
        top_p: Must be 1 unless ``loss.mismatch`` is ``tis`` or ``mask`` and vLLM samples: the
            loss works with the whole distribution.
        top_k: Must be 0, with the same exception.
        sampler: ``transformers`` samples with the policy itself, ``vllm`` with an engine.
        vllm: Settings of that engine.
        probe: The check of the engine's log-probabilities after every weight sync.
        max_prompt_tokens: Most tokens of a prompt; what the context leaves if left out.
        long_prompts: Whether a longer prompt stops the run or its task is dropped and counted.
        dynamic_sampling: Replace groups that carry no signal by newly drawn ones.
        max_refills: Most times a step draws again.
        updates_per_step: Passes over a step's rollouts.
        learning_rate: Peak of the schedule.
        lr_schedule: ``cosine`` or ``linear`` decay to ``lr_end`` x ``learning_rate``, or none.
        lr_end: Final share of the learning rate.
        warmup_steps: Steps of linear warm-up.
        adam_betas: AdamW's momentum terms.
        weight_decay: AdamW's decay.
        max_grad_norm: Gradient norm is clipped to this.
        micro_batch_tokens: Most tokens (padding included) of one forward pass.
        share_prompts: Read a prompt once for all its rollouts of a micro-batch, where exact.
        sample_rows: Most completions sampled at a time.
        dtype: What policy and engine compute in.
        master_weights: With ``bfloat16`` keep weights and optimiser in float32, so that small
            updates are not rounded away.
        gradient_checkpointing: Compute activations again in the backward pass.
        compile_model: Run the model's layers through ``torch.compile``.
        lora: Train an adapter of low rank instead of all weights (needs peft).
        one_step_off: Sample the next batch while this one trains; completions are then of
            weights one version older, which ``loss.mismatch`` corrects for (``sampler=vllm``).
        reference_model: The frozen policy of the KL term; the model as it starts if left out.
        device: ``auto`` takes CUDA if there is one; on many ranks, a GPU each.
        ranks_timeout: Seconds that ranks wait for each other before the run ends.
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
        checkpoint_keep: Number of checkpoints kept, the last ones; 0 keeps all.
        checkpoint_best: Metric of the sampled evaluation whose best checkpoint is kept as well:
            ``reward``, ``reward_weighted`` or ``reward/<name>``.
        checkpoint_async: Write checkpoints beside training, from a copy in memory.
        time_limit: Minutes after which the run must have stopped, checkpoint included.
        rollouts_every: Steps between stored rollouts (first and last always).
    """

    model: str = TINY
    seed: NonNegativeInt = 0
    steps: PositiveInt = 200
    prompts_per_step: PositiveInt = 16
    group_size: Annotated[int, Field(ge=2)] = 8
    max_completion_tokens: PositiveInt = 256
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegativeInt = 0
    sampler: Literal["transformers", "vllm"] = "transformers"
    vllm: VLLMConfig = VLLMConfig()
    probe: ProbeConfig = ProbeConfig()
    max_prompt_tokens: PositiveInt | None = None
    long_prompts: Literal["error", "drop"] = "error"
    dynamic_sampling: bool = False
    max_refills: PositiveInt = 4
    updates_per_step: PositiveInt = 1
    learning_rate: PositiveFloat = 1e-6
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    lr_end: Share = 0.05
    warmup_steps: NonNegativeInt = 0
    adam_betas: tuple[Beta, Beta] = (0.9, 0.99)
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    micro_batch_tokens: PositiveInt = 4096
    share_prompts: bool = True
    sample_rows: PositiveInt = 256
    dtype: Literal["float32", "bfloat16"] = "float32"
    master_weights: bool = True
    gradient_checkpointing: bool = False
    compile_model: bool = False
    reference_model: str | None = None
    lora: LoRAConfig | None = None
    one_step_off: bool = False
    device: str = "auto"
    ranks_timeout: PositiveFloat = 600.0
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
    checkpoint_keep: NonNegativeInt = 2
    checkpoint_best: str | None = None
    checkpoint_async: bool = False
    time_limit: PositiveFloat | None = None
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

    @model_validator(mode="after")
    def _whole_distribution(self) -> Self:
        cut = self.top_p < 1 or self.top_k > 0
        corrected = self.loss.mismatch in ("tis", "mask") and self.sampler == "vllm"
        if cut and not corrected:
            raise ConfigError(
                f"GDPOConfig: got top_p={self.top_p}, top_k={self.top_k}, expected 1.0 and 0: the "
                "loss works with the whole distribution, so cut sampling biases it; leave them "
                "out, or set sampler=vllm with loss.mismatch=tis"
            )
        return self

    @model_validator(mode="after")
    def _adapters_are_written_at_once(self) -> Self:
        if self.lora is not None and self.checkpoint_async:
            raise ConfigError(
                "GDPOConfig: checkpoint_async: got true with lora, expected false: an adapter is "
                "small and written at once; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _engine_beside(self) -> Self:
        if self.one_step_off and self.sampler != "vllm":
            raise ConfigError(
                f"GDPOConfig: one_step_off: got sampler={self.sampler!r}, expected 'vllm': the "
                "policy cannot sample with weights that are being changed; set sampler=vllm"
            )
        return self

    @model_validator(mode="after")
    def _room_for_prompts(self) -> Self:
        context = self.vllm.max_model_len if self.sampler == "vllm" else None
        if context is not None and context <= self.max_completion_tokens:
            raise ConfigError(
                f"GDPOConfig: vllm.max_model_len: got {context}, expected more than "
                f"max_completion_tokens={self.max_completion_tokens}, so that a prompt fits "
                "before it; raise it, or lower max_completion_tokens"
            )
        return self

    @model_validator(mode="after")
    def _reference_is_used(self) -> Self:
        if self.reference_model is not None and self.loss.kl_coef == 0:
            raise ConfigError(
                f"GDPOConfig: reference_model: got {self.reference_model!r} with loss.kl_coef=0, "
                "expected a KL term that reads it; set loss.kl_coef, or leave the reference out"
            )
        return self

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
        path: YAML file of a mapping, or the name of a recipe; defaults only, if left out. Keys
            that say what is trained on (``env``, ``env_args``, ``model_shape``) are passed over:
            :func:`load_run_keys` reads them.
        overrides: Such as ``"steps=50"`` or ``"advantage.weights.format=0.5"``; values are YAML.
        **given: Keys that win over the file and lose against ``overrides``.

    Raises:
        ConfigError: If the file is not a mapping, an override has no ``=``, or a key is unknown.
    """
    data = _read_yaml(config_path(path)) if path is not None else {}
    data = {key: value for key, value in data.items() if key not in RUN_KEYS}
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


def load_run_keys(path: str | Path) -> dict[str, Any]:
    """Return what a file or recipe says of the run: ``env``, ``env_args`` and ``model_shape``.

    Raises:
        ConfigError: If the file is not a mapping, or one of these is of the wrong kind.
    """
    path = config_path(path)
    found = {key: value for key, value in _read_yaml(path).items() if key in RUN_KEYS}
    for key, value in found.items():
        kind = str if key == "env" else dict
        if not isinstance(value, kind):
            raise ConfigError(
                f"{path}: {key}: got {value!r}, expected "
                + ("the name of an environment" if kind is str else "a mapping of keys")
                + "; write env: math_length, env_args: {limit: 500}"
            )
    return found


def _read_yaml(path: Path) -> dict[str, Any]:
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
