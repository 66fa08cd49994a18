"""The NeMo RL environment: its batched returns, turns, refusals, and what users write."""

import copy
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import mrgym
from mrgym import Component, Task
from mrgym.adapters import nemo_rl
from mrgym.adapters.nemo_rl import NemoRLEnvironment
from mrgym.errors import (
    ConfigError,
    MissingExtraError,
    RewardContractError,
    RewardDefinitionError,
    RolloutError,
    ScoreError,
    TaskError,
)

torch = pytest.importorskip("torch", reason="needs torch")


class Guess(mrgym.MultiTurnEnv):
    """Three turns, one component of each reduction, one gated, one measured late."""

    max_turns = 3

    def tasks(self, split):
        return [Task(f"guess {split} {i}", answer=f"no. {i}", id=f"{split}/{i}") for i in range(3)]

    @mrgym.component(low=0, high=1)
    def right(self, task, completion):
        return completion == task.answer

    @mrgym.component(reduce="sum", low=1)
    def length(self, task, completion):
        return len(completion) / 4

    @mrgym.component(reduce="max")
    def best(self, task, completion):
        return len(completion) / 2

    @mrgym.component(reduce="mean", gate=mrgym.Gate("right", 1, otherwise=-1.0))
    def quick(self, state, completion):
        return 1 / 2**state.turn

    @mrgym.component()
    def late(self, state, completion):
        early = state.turn < 2 and completion != state.task.answer
        return mrgym.ABSENT if early else 5.0

    def respond(self, state, completion):
        if completion == "crash":
            raise OSError("no game")
        return None if completion == state.task.answer else f"not {completion}"


class One(mrgym.SingleTurnEnv):
    def tasks(self, split):
        return [Task(f"say {split} {i}", id=str(i)) for i in range(2)]

    @mrgym.component(low=0, high=1)
    def only(self, task, completion):
        if completion == "crash":
            raise OSError("no grader")
        return 0.5


class Abstains(One):
    @mrgym.component(optional=True)
    def seen(self, task, completion):
        return mrgym.ABSENT


def talk(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def reference(task, split="train"):
    return {"ground_truth": f"{split}/{task.id}"}


def summed(environment, task, said):
    """Return each component summed over turns, as NeMo RL's rollouts sum it, and the last step."""
    log, metadata, total = talk("prompt"), reference(task), dict.fromkeys(Guess.components, 0.0)
    for text in said:
        log.append({"role": "assistant", "content": text})
        step = environment.step([log], [metadata])
        total = {name: total[name] + step.rewards[f"reward/{name}"][0].item() for name in total}
        log.append(step.observations[0])
        metadata = step.metadata[0]
    return total, step


def test_the_sample_has_our_components(sample):
    environment = NemoRLEnvironment({"env": "math_multi_reward"})
    logs = [talk("prompt", text) for text in sample.completions]
    step = environment.step(logs, [reference(task) for task in sample.tasks])
    names = [*sample.components[0]]
    assert [*step.rewards] == [f"reward/{name}" for name in names]
    got = zip(*(step.rewards[f"reward/{name}"].tolist() for name in names), strict=True)
    assert [dict(zip(names, scores, strict=True)) for scores in got] == sample.components


def test_the_fields_are_its_own():
    step = NemoRLEnvironment({"env": Guess()}).step(
        [talk("p", "no. 0"), talk("p", "x")],
        [reference(t) for t in Guess().task_source("train")[:2]],
    )
    assert step._fields == (
        "observations",
        "metadata",
        "next_stop_strings",
        "rewards",
        "terminateds",
        "answers",
    )
    assert {r.dtype for r in step.rewards.values()} == {torch.float32}
    assert {tuple(r.shape) for r in step.rewards.values()} == {(2,)}
    assert step.terminateds.dtype == torch.bool
    assert step.next_stop_strings == [None, None]
    assert step.answers is None


@pytest.mark.parametrize(
    "said", [["no. 1"], ["a", "no. 1"], ["abc", "", "no. 1"], ["ab", "cd", "efg"]]
)
def test_turns_add_up_to_the_episode(said):
    env = Guess()
    task = env.task_source("train")[1]
    total, step = summed(NemoRLEnvironment({"env": env}), task, said)
    assert step.terminateds.tolist() == [True]
    assert step.metadata == [None]
    assert total == pytest.approx(mrgym.score_completions(env, [task], [said])[0].components)


def test_a_conversation_that_is_cut_has_the_scores_of_its_turns():
    env = Guess()
    task = env.task_source("train")[1]
    total, step = summed(NemoRLEnvironment({"env": env}), task, ["abc", "defgh"])
    assert step.terminateds.tolist() == [False]
    assert total == mrgym.score_completions(env, [task], [["abc", "defgh"]])[0].components


def test_a_step_changes_nothing_it_was_given():
    environment, env = NemoRLEnvironment({"env": Guess()}), Guess()
    first = environment.step([talk("p", "a")], [reference(env.task_source("train")[0])])
    log, before = [talk("p", "a", "not a", "b")], copy.deepcopy(first.metadata)
    again = [environment.step(log, first.metadata) for _ in range(2)]  # as a retry of Ray would
    assert again[0].rewards == again[1].rewards
    assert first.metadata[0]["state"].turn == before[0]["state"].turn == 1
    assert first.metadata[0]["state"].messages == before[0]["state"].messages


def test_what_the_policy_is_told():
    markup = "<|im_end|>\n<|im_start|>user\n{reply}<|im_end|>\n<|im_start|>assistant\n"
    environment = NemoRLEnvironment({"env": Guess(), "reply": markup})
    references = [reference(t) for t in Guess().task_source("train")[:2]]
    step = environment.step([talk("p", "{reply}"), talk("p", "no. 1")], references)
    assert [o["role"] for o in step.observations] == ["environment"] * 2
    assert step.observations[0]["content"] == markup.replace("{reply}", "not {reply}")
    assert step.observations[1]["content"]  # empty text makes NeMo RL's token ids floats


def test_first_calls_that_come_together_load_the_tasks_once():
    def slowly():
        for i in range(4):
            time.sleep(0.01)
            yield Task(f"say {i}", id=str(i))

    env = NemoRLEnvironment({"env": Guess(tasks=slowly(), eval_tasks=[Task("held out")])})
    log = [{"role": "assistant", "content": "x"}]
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(env.step, [log], [{"ground_truth": f"train/{i}"}]) for i in range(4)]
    assert [call.result().metadata[0]["state"].task.id for call in calls] == list("0123")


def test_held_out_tasks_are_named_by_split():
    environment = NemoRLEnvironment({"env": Guess()})
    task = Guess().task_source("eval")[2]
    step = environment.step([talk("p", "x")], [reference(task, "eval")])
    assert step.metadata[0]["state"].task == task


def test_a_failed_score_stops():
    environment = NemoRLEnvironment({"env": One(), "estimator": "grpo"})
    log = [talk("p", "fine"), talk("p", "crash")]
    with pytest.raises(ScoreError, match=r"only.*no grader"):
        environment.step(log, [{"ground_truth": "train/0"}] * 2)
    with pytest.raises(ScoreError, match="no game"):
        NemoRLEnvironment({"env": Guess()}).step(
            [talk("p", "crash")], [{"ground_truth": "train/train/0"}]
        )


def test_scores_in_worker_processes(sample):
    environment = NemoRLEnvironment({"env": "math_multi_reward", "workers": 1})
    step = environment.step([talk("p", sample.completions[0])], [reference(sample.tasks[0])])
    environment.shutdown()
    assert {k: v.item() for k, v in step.rewards.items()} == {
        f"reward/{name}": score for name, score in sample.components[0].items()
    }


@pytest.mark.parametrize(
    ("log", "metadata", "error"),
    [
        (talk("p"), {"ground_truth": "train/0"}, RolloutError),
        ([], {"ground_truth": "train/0"}, RolloutError),
        ([{"role": "assistant", "content": [1]}], {"ground_truth": "train/0"}, RolloutError),
        (talk("p", "x"), {"ground_truth": "train/9"}, TaskError),
        (talk("p", "x"), {"ground_truth": "42"}, TaskError),
        (talk("p", "x"), {"ground_truth": "test/0"}, TaskError),
        (talk("p", "x"), {}, TaskError),
    ],
)
def test_what_cannot_be_scored(log, metadata, error):
    with pytest.raises(error):
        NemoRLEnvironment({"env": One(), "estimator": "grpo"}).step([log], [metadata])


def test_a_score_out_of_range_stops():
    class Wild(One):
        @mrgym.component(low=0, high=1)
        def wild(self, task, completion):
            return 2

    with pytest.raises(RewardContractError, match="wild"):
        NemoRLEnvironment({"env": Wild()}).step([talk("p", "x")], [{"ground_truth": "train/0"}])


def test_metrics_of_a_batch():
    environment = NemoRLEnvironment({"env": Guess()})
    batch = {"reward/right": torch.tensor([0.0, 1.0]), "idx": [0, 1]}
    assert environment.global_post_process_and_metrics(batch) == (batch, {"reward/right/mean": 0.5})


# What is refused when the environment is made


@pytest.mark.parametrize(
    ("cfg", "error", "named"),
    [
        ({"env": Abstains()}, RewardDefinitionError, "seen.*0.0"),
        ({"env": One()}, RewardDefinitionError, "only.*two or more"),
        (
            {"env": "math_multi_reward", "kwargs": {"prefill_think": True}},
            RewardDefinitionError,
            "prefill",
        ),
        ({"env": One(), "estimatr": "grpo"}, ConfigError, "did you mean 'estimator'"),
        ({"env": One(), "estimator": "rloo"}, ConfigError, "rloo"),
        ({"env": Guess(), "workers": -1}, ConfigError, "workers"),
        ({"env": Guess(), "reply": "no place"}, ConfigError, "reply"),
        ({}, ConfigError, "env"),
    ],
)
def test_refusals(cfg, error, named):
    with pytest.raises(error, match=named):
        NemoRLEnvironment(cfg)


def test_one_component_may_train_with_grpo():
    environment = NemoRLEnvironment({"env": One(), "estimator": "grpo"})
    step = environment.step([talk("p", "x")], [{"ground_truth": "train/1"}])
    assert step.rewards["reward/only"].tolist() == [0.5]


# What users write


def test_rows_are_of_a_response_dataset():
    assert [*nemo_rl.rows(One(), "eval")] == [
        {"input": f"say eval {i}", "output": f"eval/{i}"} for i in range(2)
    ]
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]

    class Chat(One):
        def tasks(self, split):
            return [Task(chat)]

    with pytest.raises(TaskError, match="system"):
        next(nemo_rl.rows(Chat()))


def test_weights_come_in_alphabetical_order():
    weights = {"integer": 0.25, "correctness": 2}
    made = nemo_rl.config("math_multi_reward", train="t.jsonl", weights=weights)
    names = sorted(mrgym.make("math_multi_reward").components)
    assert names == ["correctness", "format", "integer"]
    assert made["grpo"]["adv_estimator"]["reward_weights"] == [2.0, 1.0, 0.25]
    assert made["grpo"]["max_rollout_turns"] == 1
    assert made["env"]["mrgym"] == {"env": "math_multi_reward", "kwargs": {}}
    assert NemoRLEnvironment(made["env"]["mrgym"]).env.components.keys() == {*names}


def test_declared_order_does_not_matter():
    mrgym.register("zab-v0", lambda: Zab())
    made = nemo_rl.config("zab-v0", train="t.jsonl", name="other")
    assert made["grpo"]["adv_estimator"]["reward_weights"] == [1.0, 2.0, 3.0]
    assert made["data"]["train"]["env_name"] == "other"
    with pytest.raises(RewardDefinitionError, match="did you mean 'zeta'"):
        nemo_rl.config("zab-v0", train="t.jsonl", weights={"zet": 1})
    with pytest.raises(RewardDefinitionError, match=r"NeMo RL: got weights {'zeta': nan}"):
        nemo_rl.config("zab-v0", train="t.jsonl", weights={"zeta": float("nan")})


class Zab(mrgym.SingleTurnEnv):
    components = mrgym.components(
        zeta=Component(weight=3.0), beta=Component(weight=2.0), alpha=Component(weight=1.0)
    )

    def tasks(self, split):
        return [Task(f"say {split}")]

    def scores(self, task, completion):
        return {"zeta": 0, "beta": 0, "alpha": 0}


def test_registration(monkeypatch):
    with pytest.raises(ConfigError, match="NeMo RL"):
        nemo_rl.register()
    environments, actors = {}, {}
    modules = {
        "nemo_rl": SimpleNamespace(__path__=[]),
        "nemo_rl.distributed": SimpleNamespace(__path__=[]),
        "nemo_rl.environments": SimpleNamespace(__path__=[]),
        "nemo_rl.distributed.ray_actor_environment_registry": SimpleNamespace(
            ACTOR_ENVIRONMENT_REGISTRY=actors
        ),
        "nemo_rl.distributed.virtual_cluster": SimpleNamespace(
            PY_EXECUTABLES=SimpleNamespace(SYSTEM="python")
        ),
        "nemo_rl.environments.utils": SimpleNamespace(register_env=environments.__setitem__),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    nemo_rl.register("one")
    by_call = (dict(environments), dict(actors))
    environments.clear(), actors.clear()
    exec(nemo_rl.registration("one"), {})
    fqn = "mrgym.adapters.nemo_rl.MrgymEnvironment"
    assert by_call == (environments, actors) == ({"one": fqn}, {fqn: "python"})


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(vars(nemo_rl), "MrgymEnvironment", raising=False)
    with pytest.raises(MissingExtraError, match=r"mrgym\[nemo-rl\]"):
        _ = nemo_rl.MrgymEnvironment
    with pytest.raises(AttributeError, match="Nothing"):
        _ = nemo_rl.Nothing
