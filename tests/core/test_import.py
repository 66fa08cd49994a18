"""What `import mrgym` loads, and what it offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mrgym

HEAVY = ["torch", "transformers", "vllm", "datasets", "pandas", "ray", "matplotlib", "scipy"]
LATER = ["typer", "rich", "httpx", "fastapi", "mrgym_trainers", "mrgym_envs"]


@pytest.fixture(scope="module")
def loaded():
    """The modules of a fresh interpreter that imported mrgym, listed and made an environment."""
    code = (
        "import sys, mrgym; one = {*sys.modules}; "
        "mrgym.make('math_multi_reward', train_count=2, eval_count=2).reset(seed=0); "
        "print(*one); print(*sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [{*line.split()} for line in out.stdout.splitlines()]


@pytest.mark.parametrize("name", HEAVY)
def test_nothing_heavy_is_loaded_even_to_make_an_environment(loaded, name):
    assert name not in loaded[0] | loaded[1]


@pytest.mark.parametrize("name", LATER)
def test_what_only_a_command_or_another_layer_needs_comes_later(loaded, name):
    assert name not in loaded[0]


def test_the_public_api_is_small_and_sorted():
    assert len(mrgym.__all__) <= 42
    assert len({*mrgym.__all__}) == len(mrgym.__all__)
    assert mrgym.__all__ == sorted(
        mrgym.__all__, key=lambda n: (not n.isupper(), n[0].islower(), n)
    )


@pytest.mark.parametrize("name", mrgym.__all__)
def test_every_public_name_resolves_and_is_documented(name):
    value = getattr(mrgym, name)
    assert value.__doc__


@pytest.mark.parametrize(
    ("error", "standard"),
    [
        (mrgym.RewardContractError, ValueError),
        (mrgym.RewardDefinitionError, ValueError),
        (mrgym.TaskError, ValueError),
        (mrgym.ConfigError, ValueError),
        (mrgym.WireError, ValueError),
        (mrgym.RolloutError, ValueError),
        (mrgym.RegistryError, LookupError),
        (mrgym.ScoreError, RuntimeError),
        (mrgym.SamplerError, RuntimeError),
        (mrgym.MissingExtraError, ImportError),
    ],
)
def test_errors_are_ours_and_the_standard_librarys(error, standard):
    assert issubclass(error, mrgym.MrgymError)
    assert issubclass(error, standard)


def test_a_missing_extra_shows_the_command():
    error = mrgym.MissingExtraError("torch", "train")
    assert str(error).endswith("pip install 'mrgym[train]'")
