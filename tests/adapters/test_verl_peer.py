"""verl's own loader, dataset, reward manager, configuration and GDPO on our reward function."""

import asyncio
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

import mrgym
from mrgym.adapters import verl as adapter
from mrgym.errors import RewardDefinitionError

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
pytest.importorskip("verl", reason="needs verl (make test-peers)")
pytest.importorskip("torch", reason="needs torch")
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl import DataProto
from verl.trainer.ppo.core_algos import compute_gdpo_outcome_advantage
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils.dataset.rl_dataset import RLHFDataset

from mrgym_trainers.advantages import AdvantageConfig, compute_advantages

WEIGHTS = {"correctness": 1.0, "format": 0.5, "integer": 0.25}


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer of bytes: every text comes back as it was."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def configuration(path, name="compute_score"):
    function = {"path": str(path), "name": name}
    return OmegaConf.create(
        {
            "reward": {
                "custom_reward_function": function,
                "reward_manager": {"name": "gdpo", "source": "register"},
            },
            "trainer": {"experiment_name": "test"},
        }
    )


@pytest.fixture(scope="module")
def scored(sample, tokenizer, tmp_path_factory):
    """What verl's reward manager says of the sample, on rows that its dataset has read."""
    folder = tmp_path_factory.mktemp("verl")
    path = adapter.write_module(folder / "reward.py", "math_multi_reward")
    with (folder / "train.jsonl").open("w") as lines:
        for row in adapter.rows(sample.env):
            print(json.dumps(row), file=lines)
    options = {"cache_dir": str(folder), "filter_overlong_prompts": False}
    dataset = RLHFDataset([str(folder / "train.jsonl")], tokenizer, OmegaConf.create(options))
    rows = {row["extra_info"]["task_id"]: row for row in dataset}
    manager = load_reward_manager(configuration(path), tokenizer)
    loop = manager.loop

    async def all_of_them():
        manager.loop = asyncio.get_running_loop()
        pairs = zip(sample.tasks, sample.completions, strict=True)
        batches = [batch_of(tokenizer, rows[task.id], text) for task, text in pairs]
        return await asyncio.gather(*(manager.run_single(batch) for batch in batches))

    results = asyncio.run(all_of_them())
    manager.loop = loop
    return SimpleNamespace(rows=rows, results=results)


def batch_of(tokenizer, row, text):
    ids = torch.tensor([tokenizer(text)["input_ids"] or [0]])
    # One token of padding after the text: verl decodes only what the mask covers.
    responses = torch.cat([ids, torch.zeros((1, 1), dtype=torch.long)], dim=1)
    mask = torch.ones_like(responses)
    mask[0, len(tokenizer(text)["input_ids"]) :] = 0
    tensors = TensorDict({"responses": responses, "attention_mask": mask}, batch_size=1)
    columns = {"data_source": row["data_source"], "reward_model": row["reward_model"]}
    columns["extra_info"] = dict(row["extra_info"])
    objects = {key: np.array([value], dtype=object) for key, value in columns.items()}
    return DataProto(batch=tensors, non_tensor_batch=objects)


def test_the_sample_through_its_manager_has_our_components(sample, scored):
    for result, expected in zip(scored.results, sample.components, strict=True):
        assert result["reward_score"] == sum(expected.values())
        assert result["reward_extra_info"] == {"score": sum(expected.values()), **expected}


def test_its_dataset_reads_our_rows(sample, scored):
    task = sample.tasks[0]
    row = scored.rows[task.id]
    assert row["raw_prompt"] == sample.env.messages(task)
    assert row["reward_model"] == {"style": "rule", "ground_truth": task.answer}
    assert row["data_source"] == "math_multi_reward-v1"


def test_no_column_of_its_rows_may_be_a_component(scored):
    row = next(iter(scored.rows.values()))
    assert row.keys() <= adapter.TAKEN


@pytest.mark.parametrize("path", ["a b/c's.py", "a\\b.py", "a\\'b.py", "end\\"])
def test_paths_and_names_are_read_by_hydra_as_they_are(path):
    names = ["null", "True", "nan", "inf", "a-b", "c.d"]

    class Named(mrgym.SingleTurnEnv):
        components = mrgym.components(**{name: mrgym.Component() for name in names})

    lines = OverridesParser.create().parse_overrides(adapter.config_lines(Named(), path))
    assert lines[0].value() == path
    assert lines[4].value() == names


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_its_loader_refuses_when_it_loads(tmp_path, tokenizer, prefix):
    path = tmp_path / "reward.py"
    path.write_text(
        "from mrgym.adapters.verl import compute_score_for\n"
        "compute_score = compute_score_for('math_multi_reward', kwargs={'prefill_think': True})\n"
    )
    with pytest.raises(RuntimeError) as caught:
        load_reward_manager(configuration(f"{prefix}{path}"), tokenizer)
    assert isinstance(caught.value.__cause__, RewardDefinitionError)


@pytest.mark.parametrize("seed", range(3))
def test_its_gdpo_agrees_with_our_preset(sample, scored, seed):
    draw = np.random.default_rng(seed)
    ids = [task.id for task in sample.tasks]
    order = draw.permutation(200)
    lengths = torch.tensor(draw.integers(1, 30, size=200))
    mask = (torch.arange(30)[None] < lengths[:, None]).long()
    infos = [scored.results[i]["reward_extra_info"] for i in order]
    columns = {key: np.array([info[key] for info in infos]) for key in infos[0]}
    advantages, _ = compute_gdpo_outcome_advantage(
        token_level_rewards=torch.zeros(200, 30),
        response_mask=mask,
        index=np.array([ids[i] for i in order], dtype=object),
        config={
            "gdpo_reward_keys": [*WEIGHTS],
            "gdpo_reward_weights": [*WEIGHTS.values()],
        },
        non_tensor_batch=columns,
        batch={
            "prompts": torch.zeros(200, 4),
            "attention_mask": torch.cat([torch.ones(200, 4, dtype=torch.long), mask], dim=1),
        },
    )
    numbers = {task_id: n for n, task_id in enumerate(sorted(set(ids)))}
    ours = compute_advantages(
        {mrgym.reward_key(name): [sample.components[i][name] for i in order] for name in WEIGHTS},
        [numbers[ids[i]] for i in order],
        AdvantageConfig.preset("verl", weights=WEIGHTS),
        completion_lengths=lengths,
    )
    expected = torch.as_tensor(ours.advantages)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(advantages[:, 0].double(), expected, rtol=2e-4, atol=2e-4)


def test_its_configuration_takes_our_lines(tmp_path):
    hydra = pytest.importorskip("hydra", reason="needs hydra-core")
    import verl.trainer

    folder = os.path.join(os.path.dirname(verl.trainer.__file__), "config")
    path = tmp_path / "it's a folder" / "reward.py"
    lines = adapter.config_lines("math_multi_reward", path, weights=WEIGHTS)
    with hydra.initialize_config_dir(config_dir=folder, version_base=None):
        made = hydra.compose("ppo_trainer", overrides=lines)
    assert made.reward.custom_reward_function.path == str(path)
    assert made.reward.custom_reward_function.name == "compute_score"
    assert made.reward.reward_manager.name == made.algorithm.adv_estimator == "gdpo"
    chosen = zip(made.algorithm.gdpo_reward_keys, made.algorithm.gdpo_reward_weights, strict=True)
    assert dict(chosen) == WEIGHTS
    assert made.trainer.use_v1 is False
