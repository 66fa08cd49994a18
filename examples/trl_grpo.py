"""Train an environment of mrgym with TRL's GRPOTrainer, on a laptop.

pip install 'mrgym[trl]'
python examples/trl_grpo.py [--steps 100] [--out runs/trl]
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import mrgym
from mrgym.adapters import trl as mrgym_trl
from mrgym_trainers.tiny_policy import tiny_policy_path


def main() -> None:
    """Train the policy in the package, then print the last means TRL logged."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="runs/trl")
    args = parser.parse_args()

    env = mrgym.make("math_multi_reward")
    weights = {"correctness": 1.0, "format": 0.5, "integer": 0.5}  # by name
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_policy_path())
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(tiny_policy_path(), dtype=torch.float32),
        reward_funcs=mrgym_trl.reward_functions(env, tokenizer=tokenizer, max_completion_length=48),
        args=GRPOConfig(
            output_dir=args.out,
            max_steps=args.steps,
            logging_steps=max(args.steps // 10, 1),
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=48,
            learning_rate=1e-3,
            multi_objective_aggregation="normalize_then_sum",  # GDPO, arXiv 2601.05242
            reward_weights=mrgym_trl.reward_weights(env, weights),
            report_to="none",
            save_strategy="no",
            bf16=torch.cuda.is_available(),
        ),
        train_dataset=mrgym_trl.dataset(env, "train"),
        processing_class=tokenizer,
    )
    trainer.train()
    logged = [line for line in trainer.state.log_history if "reward" in line]
    for name in weights:
        key = f"rewards/{name}/mean"
        print(f"{name:<12} {logged[0][key]:.3f} -> {logged[-1][key]:.3f}")


if __name__ == "__main__":
    main()
