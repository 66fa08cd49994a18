"""The NeMo RL environment as the Ray actor that NeMo RL makes of it, with the real Ray."""

import importlib
import os

import pytest

from mrgym.adapters import nemo_rl

ray = pytest.importorskip("ray", reason="needs ray (make test-peers)")
torch = pytest.importorskip("torch", reason="needs torch")


@pytest.fixture(scope="module")
def actor():
    before = os.environ.get("RAY_AUTH_MODE")
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
    module, _, name = nemo_rl.ACTOR.rpartition(".")
    actor_class = getattr(importlib.import_module(module), name)  # as hydra's get_object does
    config = nemo_rl.config("math_multi_reward", train="train.jsonl")["env"]["mrgym"]
    yield actor_class.options(runtime_env={"env_vars": {}}).remote(config)
    ray.shutdown()
    os.environ.pop("RAY_AUTH_MODE")
    if before is not None:
        os.environ["RAY_AUTH_MODE"] = before


def batch(sample, start=0, stop=200):
    logs = [
        [{"role": "user", "content": "p"}, {"role": "assistant", "content": text}]
        for text in sample.completions[start:stop]
    ]
    return logs, [{"ground_truth": f"train/{task.id}"} for task in sample.tasks[start:stop]]


@pytest.mark.slow
def test_the_sample_through_the_actor_has_our_components(sample, actor):
    step = ray.get(actor.step.remote(*batch(sample)))
    observations, metadata, stops, rewards, terminateds, answers = step
    for i, expected in enumerate(sample.components):
        assert {k.removeprefix("reward/"): v[i].item() for k, v in rewards.items()} == expected
    assert terminateds.all()
    assert metadata == stops == [None] * 200
    assert len(observations) == 200
    assert answers is None


@pytest.mark.slow
def test_calls_of_single_samples_side_by_side(sample, actor):
    calls = [actor.step.remote(*batch(sample, i, i + 1)) for i in range(50)]
    for step, expected in zip(ray.get(calls), sample.components[:50], strict=True):
        assert {k: v.item() for k, v in step.rewards.items()} == {
            f"reward/{name}": score for name, score in expected.items()
        }


@pytest.mark.slow
def test_an_error_reaches_the_trainer(actor):
    with pytest.raises(ray.exceptions.RayTaskError, match="policy's turn"):
        ray.get(actor.step.remote([[]], [{"ground_truth": "train/x"}]))
    assert ray.get(actor.global_post_process_and_metrics.remote({}))[1] == {}
