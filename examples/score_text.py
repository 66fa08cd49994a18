"""Score texts with an environment: one at a time, or a group drawn from a sampler."""

import mrgym

GOOD = "<think>3+4=7 7*2=14</think>\n<answer>14</answer>"


def main() -> None:
    """Score one completion through Gymnasium's interface, then a group through a sampler."""
    env = mrgym.make("math_multi_reward")
    question, info = env.reset(seed=0)
    _, reward, terminated, _, info = env.step(GOOD)
    print(f"question  {question.strip()}")
    print(f"reward    {reward}, the sum of {info['reward_components']} (terminated: {terminated})")

    task = mrgym.Task(prompt="What is (3 + 4) * 2?", answer="14")
    sampler = mrgym.ScriptedSampler([GOOD, "14", "fourteen", "<answer>14"])
    group = mrgym.run_group(env, sampler, task, 4, mrgym.SamplingParams())
    for rollout in group.rollouts:
        print(f"{rollout.turns[0].completion!r:<52} {rollout.components}")


if __name__ == "__main__":
    main()
