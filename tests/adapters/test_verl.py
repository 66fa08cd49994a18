"""verl's reward function of an environment, its rows and configuration, without verl."""

import threading
import warnings

import pytest

import mrgym
from mrgym import Component, Task
from mrgym.adapters import verl
from mrgym.errors import ConfigError, RewardDefinitionError, ScoreError, TaskError
from mrgym.scoring import WorkerScorer


class Echo(mrgym.SingleTurnEnv):
    inside = 0

    def tasks(self, split):
        return [Task(f"say {split} {i}", answer=i, id=str(i)) for i in range(3)]

    @mrgym.component(weight=2.0)
    def zeta(self, task, completion):
        if completion == "crash":
            raise OSError("no grader")
        return task.answer

    @mrgym.component
    def alpha(self, task, completion):
        return "eval" in task.prompt

    @mrgym.component
    def alone(self, task, completion):
        type(self).inside += 1
        threading.Event().wait(0.002)
        seen = type(self).inside
        type(self).inside -= 1
        return seen == 1


class Abstains(Echo):
    @mrgym.component(optional=True)
    def seen(self, task, completion):
        return mrgym.ABSENT


class Talk(mrgym.MultiTurnEnv):
    components = mrgym.components(a=Component(), b=Component())


def call(score, text="x", task_id="1", split="train"):
    info = {"task_id": task_id, "split": split, "experiment_name": "e"}
    return score(
        data_source="d", solution_str=text, ground_truth="g", extra_info=info, reward_router=None
    )


def test_the_sample_has_our_components(sample):
    score = verl.compute_score_for("math_multi_reward")
    info = {row["extra_info"]["task_id"]: row for row in verl.rows("math_multi_reward")}
    for task, text, expected in zip(
        sample.tasks, sample.completions, sample.components, strict=True
    ):
        row = info[task.id]
        got = score(
            data_source=row["data_source"],
            solution_str=text,
            ground_truth=row["reward_model"]["ground_truth"],
            extra_info=row["extra_info"],
        )
        assert got == {"score": sum(expected.values()), **expected}
        assert [*got] == ["score", *expected]


def test_tasks_are_found_on_both_splits():
    score = verl.compute_score_for(Echo())
    assert call(score, task_id="2", split="train") == {
        "score": 3.0,
        "zeta": 2.0,
        "alpha": 0.0,
        "alone": 1.0,
    }
    assert call(score, task_id="0", split="eval")["alpha"] == 1.0


def test_a_failed_score_stops():
    score = verl.compute_score_for(Echo())
    with pytest.raises(ScoreError, match=r"no grader.*mend the score function \(verl would"):
        call(score, "crash")
    assert call(score)["zeta"] == 1.0


@pytest.mark.parametrize(
    "info",
    [
        None,
        {},
        {"task_id": "1"},
        {"task_id": 1, "split": "train"},
        {"task_id": "1", "split": "test"},
        {"task_id": "9", "split": "train"},
    ],
)
def test_rows_that_name_no_task(info):
    score = verl.compute_score_for(Echo())
    with pytest.raises(TaskError):
        score("d", "x", "g", info)


def test_calls_do_not_meet_inside_score_functions():
    score, met = verl.compute_score_for(Echo()), []
    threads = [threading.Thread(target=lambda: met.append(call(score))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got["alone"] for got in met] == [1.0] * 8


def test_scores_in_worker_processes(sample):
    with WorkerScorer(workers=1) as scorer:
        score = verl.compute_score_for(sample.env, scorer=scorer)
        got = call(score, sample.completions[0], sample.tasks[0].id)
    assert got == {"score": sum(sample.components[0].values()), **sample.components[0]}


def test_rows():
    first, *_ = rows = [*verl.rows(Echo(), "eval")]
    assert first == {
        "data_source": "Echo",
        "prompt": [{"role": "user", "content": "say eval 0"}],
        "ability": "",
        "reward_model": {"style": "rule", "ground_truth": "0"},
        "extra_info": {"task_id": "0", "split": "eval", "index": 0},
    }
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2]


def test_the_configuration_keeps_weights_with_their_names():
    assert verl.config_lines(Echo(), "a/reward.py", weights={"alpha": 3}) == [
        "reward.custom_reward_function.path=a/reward.py",
        "reward.custom_reward_function.name=compute_score",
        "reward.reward_manager.name=gdpo",
        "algorithm.adv_estimator=gdpo",
        "+algorithm.gdpo_reward_keys=[zeta,alpha,alone]",
        "+algorithm.gdpo_reward_weights=[2.0,3.0,1.0]",
        "trainer.use_v1=False",
    ]
    with pytest.raises(RewardDefinitionError, match="did you mean 'alpha'"):
        verl.config_lines(Echo(), "reward.py", weights={"alfa": 3})


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "1", None])
def test_a_weight_that_is_no_finite_number_is_refused(wrong):
    with pytest.raises(RewardDefinitionError, match=r"verl: got weights {'alpha': .*finite"):
        verl.config_lines(Echo(), "reward.py", weights={"alpha": wrong})


def test_the_module_is_a_file_that_makes_the_function(tmp_path, sample):
    path = verl.write_module(
        tmp_path / "reward.py", "math_multi_reward", kwargs={"seed": 0, "kinds": None}
    )
    namespace = {}
    exec(path.read_text(encoding="utf-8"), namespace)
    got = call(namespace["compute_score"], sample.completions[0], sample.tasks[0].id)
    assert got == {"score": sum(sample.components[0].values()), **sample.components[0]}
    with pytest.raises(ConfigError, match="JSON"):
        verl.write_module(tmp_path / "x.py", "math_multi_reward", kwargs={"tasks": {1}})


# What is refused when the function is made


def named(name):
    class Clash(mrgym.SingleTurnEnv):
        components = mrgym.components(**{name: Component(), "other": Component()})

    return Clash()


@pytest.mark.parametrize("name", sorted(verl.TAKEN))
def test_taken_names_are_refused(name):
    with pytest.raises(RewardDefinitionError, match=name):
        verl.compute_score_for(named(name))


@pytest.mark.parametrize(
    ("env", "kwargs", "expected"),
    [
        (Abstains(), {}, "optional components.*seen"),
        (Talk(), {}, "one completion"),
        ("math_multi_reward", {"prefill_think": True}, "prefill"),
    ],
)
@pytest.mark.parametrize("make", ["function", "module", "rows", "lines"])
def test_what_would_be_lost_is_refused(env, kwargs, expected, make, tmp_path):
    with pytest.raises(RewardDefinitionError, match=expected):
        {
            "function": lambda: verl.compute_score_for(env, kwargs=kwargs),
            "module": lambda: verl.write_module(tmp_path / "r.py", env, kwargs=kwargs),
            "rows": lambda: next(verl.rows(env, kwargs=kwargs)),
            "lines": lambda: verl.config_lines(env, "r.py", kwargs=kwargs),
        }[make]()


def test_a_batched_component_that_gets_one_at_a_time_is_said_aloud():
    class Ranked(Echo):
        @mrgym.component(batched=True)
        def rank(self, tasks, completions):
            return [float(i) for i in range(len(completions))]

    with pytest.warns(UserWarning, match=r"batched components \['rank'\] .* one completion"):
        verl.compute_score_for(Ranked())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verl.compute_score_for(Echo())
