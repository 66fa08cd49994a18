"""The proof, after every weight sync, that the engine samples from the policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mrgym.errors import SamplerError
from mrgym.sampler import Completion, Prompt, Sampler
from mrgym.seeding import mix
from mrgym_trainers.gdpo.config import GDPOConfig
from mrgym_trainers.gdpo.draw import sampling_params
from mrgym_trainers.gdpo.policy import Policy
from mrgym_trainers.gdpo.ranks import Ranks

__all__ = ["LogprobProbe"]

_PROBE = 1_000_000  # no attempt of a step's drawing; so that a probe's random numbers are no step's


class LogprobProbe:
    """Samples a few completions and compares their log-probabilities with the policy's.

    Args:
        policy: The policy.
        sampler: An engine with weights of its own.
        prompts: Encoded prompts to complete, used in turn.
        config: ``probe``, ``temperature``, ``dtype`` and ``seed``.
        ranks: Ranks with an engine each; one that differs ends the run of all.
    """

    def __init__(
        self,
        policy: Policy,
        sampler: Sampler,
        prompts: Sequence[Prompt],
        config: GDPOConfig,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or Ranks()
        self._policy, self._sampler, self._config = policy, sampler, config
        count = config.probe.completions if prompts else 0
        self._prompts = [prompts[i % len(prompts)] for i in range(count)]
        self._limit = config.probe.limit(config.dtype)

    def check(self, version: int) -> dict[str, float]:
        """Return ``probe/gap_max`` and ``probe/gap_mean`` of freshly sampled tokens.

        Args:
            version: The weights' version, the step they come from.

        Raises:
            SamplerError: If a token's log-probabilities differ by more than the threshold.
        """
        if not self._prompts:
            return {}
        params = sampling_params(
            self._config,
            mix(self._config.seed, version, _PROBE),
            max_tokens=self._config.probe.tokens,
            top_p=1.0,  # what the policy's log-probabilities are of
            top_k=0,
        )
        sampled = self._sampler.sample(self._prompts, 1, params)
        pairs = zip(self._prompts, sampled, strict=True)
        gaps = torch.cat([self._gap(prompt, group[0]) for prompt, group in pairs])
        worst = self._ranks.most(float(gaps.max()))
        if not worst <= self._limit:  # NaN is no agreement either
            raise SamplerError(
                f"weight sync {version}: got log-probabilities that differ by up to {worst:.3g} "
                f"(mean {float(gaps.mean()):.3g}) between sampler and policy, expected at most "
                f"{self._limit:g} in {self._config.dtype}; the engine does not sample from the "
                "policy: check that it was started from the same model, or raise probe.threshold "
                "where its precision explains the difference"
            )
        return {"probe/gap_max": worst, "probe/gap_mean": float(gaps.mean())}

    @torch.no_grad()
    def _gap(self, prompt: Prompt, completion: Completion) -> torch.Tensor:
        ids = [*prompt.token_ids, *completion.token_ids]
        input_ids_BT = torch.tensor([ids], device=self._policy.device)
        self._policy.model.eval()
        policy_logprobs_BT, _ = self._policy.logprobs(
            input_ids_BT, len(prompt.token_ids), temperature=self._config.temperature
        )
        sampler_logprobs_T = torch.tensor(completion.sampler_logprobs)
        return (policy_logprobs_BT[0].cpu() - sampler_logprobs_T).abs()
