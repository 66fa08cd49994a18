"""Every recipe is loaded and dry-run; the one for a laptop trains."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from mrgym.cli import main
from mrgym.errors import ConfigError
from mrgym_trainers import GDPOTrainer
from mrgym_trainers.gdpo.config import load_config, load_run_keys
from mrgym_trainers.gdpo.plan import plan_run
from mrgym_trainers.recipes import config_path, list_recipes

RECIPES = {recipe.name: recipe for recipe in list_recipes()}
RANKS = {"laptop": 1, "single-gpu": 1, "multi-node": 16}
GPU_GIB = {"single-gpu": 24.0}


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """Runs the command; gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["mrgym", *map(str, args)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        return code, *capsys.readouterr()

    return run


def test_the_recipes_that_are_promised_are_there():
    assert {*RECIPES} == {
        "gdpo-paper-gsm8k", "gdpo-paper-length", "laptop", "multi-node",
        "qwen2.5-1.5b-gsm8k-8xh100", "single-gpu",
    }  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_what_it_is_and_how_it_is_started(name):
    header = RECIPES[name].path.read_text().split("\n\n")[0]
    for word in ("# Hardware: ", "# Arithmetic: ", "# Launch: ", "torchrun" if name != "single-gpu"
                 else "mrgym train", f"--config {name}"):  # fmt: skip
        assert word in header
    assert len(RECIPES[name].summary) > 20


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_loaded_and_dry_run_without_a_warning(name):
    keys = load_run_keys(name)
    config = load_config(name)
    plan = plan_run(
        keys["env"], config, env_kwargs=keys.get("env_args"), ranks=RANKS.get(name, 8),
        gpu_gib=GPU_GIB.get(name, 80.0), described=keys.get("model_shape"),
    )  # fmt: skip
    assert plan.warnings == []
    assert plan.memory is not None
    assert {*plan.weights} == {*config.advantage.weights}


@pytest.mark.parametrize("name", RECIPES)
def test_the_arithmetic_in_the_header_is_that_of_the_keys(name):
    config = load_config(name)
    header = RECIPES[name].path.read_text().split("\n\n")[0].replace("\n#  ", "")
    prompts, size, rollouts = re.search(r"(\d+) prompts x (\d+) = ([\d,]+)", header).groups()
    assert (int(prompts), int(size)) == (config.prompts_per_step, config.group_size)
    assert int(rollouts.replace(",", "")) == config.prompts_per_step * config.group_size
    assert re.search(rf"\b{config.steps}\s+steps", header)


def test_the_papers_figures_and_the_seeds_weights():
    paper = load_config("gdpo-paper-gsm8k")
    assert paper.prompts_per_step * paper.group_size == 512
    assert (paper.learning_rate, paper.lr_schedule, paper.lr_end) == (5e-6, "cosine", 0.0)
    assert paper.warmup_steps == int(0.1 * paper.steps)
    assert (paper.loss.clip_low, paper.loss.clip_high, paper.loss.kl_coef) == (0.2, 0.2, 0.04)
    assert (paper.max_prompt_tokens, paper.max_completion_tokens) == (512, 1024)
    assert paper.steps == 7473 // paper.prompts_per_step  # one epoch
    ours = load_config("qwen2.5-1.5b-gsm8k-8xh100")
    assert ours.model == "Qwen/Qwen2.5-1.5B-Instruct"
    assert ours.advantage.weights == {"correctness": 1.0, "format": 0.5, "integer": 0.25}


@pytest.mark.slow
def test_the_laptop_recipe_trains(tmp_path):
    keys = load_run_keys("laptop")
    config = load_config("laptop", ["steps=2", "eval_tasks=8"])
    summary = GDPOTrainer(keys["env"], config, out=tmp_path / "run").train()
    assert (summary["steps"], summary["completions"]) == (2, 512)
    assert summary["eval"]["end"].keys() >= {"reward/correctness", "reward/format"}


def test_a_recipe_brings_its_environment(cli):
    code, out, err = cli("train", "--config", "laptop", "--dry-run", "--json", "steps=5")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert (plan["env"], plan["batch"]["steps"]) == ("math_multi_reward", 5)
    assert plan["config"]["steps"] == 5


def test_the_command_line_wins_over_the_recipe(cli):
    args = ("train", "math_length", "--config", "laptop", "--dry-run", "--json")
    code, out, _ = cli(*args, "advantage.weights={length: 2.0}", "-e", "train_count=100")
    assert code == 0
    plan = json.loads(out)
    assert plan["env"] == "math_length"
    assert plan["weights"] == {"correctness": 1.0, "length": 2.0}
    assert plan["batch"]["train_tasks"] == 100


def test_arguments_of_a_recipe_hold_for_its_own_environment_only(cli, tmp_path):
    (tmp_path / "mine.yaml").write_text("env: math_length\nenv_args: {limit: 5, train_count: 64}\n")
    _, out, _ = cli("train", "--config", "mine.yaml", "--dry-run", "--json")
    assert json.loads(out)["batch"]["train_tasks"] == 64
    _, out, _ = cli("train", "math_length-v1", "--config", "mine.yaml", "--dry-run", "--json")
    assert json.loads(out)["batch"]["train_tasks"] == 64
    code, out, _ = cli("train", "math_multi_reward", "--config", "mine.yaml", "--dry-run", "--json")
    assert (code, json.loads(out)["batch"]["train_tasks"]) == (0, 4096)


def test_a_dry_run_writes_nothing_and_prints_tables(cli, tmp_path):
    args = ("train", "--config", "qwen2.5-1.5b-gsm8k-8xh100", "--dry-run", "--ranks", 8)
    code, out, err = cli(*args, "--out", tmp_path / "run")
    assert (code, err) == (0, "")
    for words in ("128 prompts x 8 = 1,024 rollouts", "16 prompts, 128 rollouts", "of 80",
                  "1,543,714,304 parameters", "a data set of a hub"):  # fmt: skip
        assert words in re.sub(r"[\s│]+", " ", out), words
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--dry-run"], ["got no environment", "--config laptop"]),
        (["steps=2", "--dry-run"], ["got no environment"]),
        (["--config", "lapto", "--dry-run"], ["did you mean 'laptop'"]),
        (["--config", "laptop", "--dry-run", "--ranks", "0"], ["ranks=0", "above 0"]),
        (["--config", "laptop", "--dry-run", "-e", "nothing=1"], ["nothing"]),
    ],
)
def test_wrong_input_is_one_line(cli, args, words):
    code, out, err = cli("train", *args)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert all(word in line for word in words), line


@pytest.mark.parametrize("text", ["env: 3", "env_args: [1]", "model_shape: big"])
def test_keys_of_the_wrong_kind_are_errors(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=text.partition(":")[0]):
        load_run_keys(path)


def test_a_file_wins_over_a_recipe_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config_path("laptop") == RECIPES["laptop"].path
    (tmp_path / "laptop").write_text("steps: 3\n")
    assert load_config("laptop").steps == 3


def test_recipes_are_listed(cli):
    _, out, _ = cli("list", "--recipes", "--json")
    assert [row["name"] for row in json.loads(out)] == [*RECIPES]
    assert all(yaml.safe_load(recipe.path.read_text()) for recipe in RECIPES.values())


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_slurm_script_is_one_and_starts_the_recipe(tmp_path):
    script = RECIPES["multi-node"].path.with_name("multi_node.slurm")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, answer in (("scontrol", "echo head-node; echo other"), ("srun", 'echo "$@"')):
        (bin_folder / name).write_text(f"#!/bin/bash\n{answer}\n")
        (bin_folder / name).chmod(0o755)
    env = {
        "PATH": f"{bin_folder}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_SUBMIT_DIR": str(tmp_path),
    }  # fmt: skip
    done = subprocess.run(["bash", script, "steps=3"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    started = done.stdout.split()
    assert started[0] == "torchrun"
    assert started[started.index("--rdzv-endpoint") + 1] == "head-node:20007"
    assert started[started.index("--nnodes") + 1] == "2"
    assert started[-1] == "steps=3"
    assert started[started.index("--config") + 1] == "multi-node"
