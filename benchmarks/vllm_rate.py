"""vLLM's rate inside the trainer against its own offline rate, and what seeds and ids cost.

    python benchmarks/vllm_rate.py [--model FOLDER] [--prompts 32] [--n 8] [--tokens 36]

One engine, taken in turn: ``LLM.generate`` as a script would call it (no seeds, no text), the same
with a seed for every completion, and the sampler's stream as the trainer reads it. Printed are
tokens a second (median of the rounds) and their ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import mrgym
from mrgym.sampler import SamplingParams


def main() -> None:
    """Start an engine, take turns and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=36)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    from vllm import SamplingParams as EngineParams

    from mrgym_trainers import GDPOConfig
    from mrgym_trainers.gdpo.policy import load_policy
    from mrgym_trainers.gdpo.setup import make_sampler

    policy = load_policy(args.model, device="cpu")
    sampler = make_sampler(GDPOConfig(model=args.model, sampler="vllm"), policy)
    env = mrgym.make("math_multi_reward")
    tasks = list(env.task_source("train"))[: args.prompts]
    prompts = [env.prompt_for(task) for task in tasks]
    ids = [{"prompt_token_ids": sampler.codec.start(prompt)} for prompt in prompts]

    def offline(seeded: bool) -> int:
        params = [
            EngineParams(
                n=args.n,
                max_tokens=args.tokens,
                logprobs=0,
                detokenize=False,
                seed=i if seeded else None,
            )
            for i in range(len(ids))
        ]
        outputs = sampler._llm.generate(ids, params, use_tqdm=False)
        return sum(len(c.token_ids) for output in outputs for c in output.outputs)

    def streamed() -> int:
        params = SamplingParams(max_tokens=args.tokens, seed=1)
        return sum(len(c.token_ids) for _, _, c in sampler.stream(prompts, args.n, params))

    ways: dict[str, Callable[[], int]] = {
        "offline": lambda: offline(False),
        "offline, seeded": lambda: offline(True),
        "in the trainer": streamed,
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(args.rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            tokens = way()
            if round_:  # the first warms up
                rates[name].append(tokens / (time.perf_counter() - start))
    base = statistics.median(rates["offline"])
    for name, values in rates.items():
        rate = statistics.median(values)
        print(f"{name:16} {rate:8.0f} tokens/s  {rate / base:.2f} of offline")
    sampler.close()


if __name__ == "__main__":
    main()
