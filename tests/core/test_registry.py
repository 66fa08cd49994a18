"""Environments by id: make, make_vec, register, spec, list_envs."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys

import gymnasium as gym
import pytest
from gymnasium import spaces

import mrgym
import mrgym.remote
from mrgym import RegistryError, registry
from mrgym.errors import ConfigError, RemoteError


class Coin(mrgym.MultiRewardEnv[int, int]):
    """Rewards naming the side."""

    components = mrgym.components(
        right=mrgym.Component(low=0, high=1), bonus=mrgym.Component(low=0)
    )
    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(2)

    def __init__(self, bonus=0.5):
        self.bonus = bonus

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return self.emit(0, {"right": action, "bonus": self.bonus}, terminated=True)


def coin(bonus=0.5):
    return Coin(bonus)


def plain():
    return gym.make("CartPole-v1")


def limited():
    return gym.wrappers.TimeLimit(Coin(), 3)


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_registered", {})


HERE = f"{__name__}:Coin"


class TestMake:
    @pytest.mark.parametrize("env_id", ["coin", "coin-v1", HERE])
    def test_by_name_by_version_and_by_class(self, env_id):
        mrgym.register("coin", Coin)
        env = mrgym.make(env_id, bonus=2)
        assert (type(env), env.bonus) == (Coin, 2)

    @pytest.mark.parametrize("versions", [(1, 2), (2, 1), (2, 10, 9)])
    def test_a_bare_name_is_the_newest_version(self, versions):
        for version in versions:
            mrgym.register(f"coin-v{version}", Coin, bonus=version)
        assert mrgym.make("coin").bonus == max(versions)
        assert mrgym.spec("coin").id == f"coin-v{max(versions)}"
        assert mrgym.make(f"coin-v{versions[0]}").bonus == versions[0]

    @pytest.mark.parametrize("entry_point", [Coin, coin, HERE, functools.partial(Coin, bonus=0.5)])
    def test_anything_that_makes_one_is_an_entry_point(self, entry_point):
        spec = mrgym.register("coin", entry_point)
        assert mrgym.make("coin").bonus == 0.5
        assert "oin" in spec.location

    def test_arguments_override_the_registered_ones(self):
        mrgym.register("coin", Coin, bonus=1)
        assert [mrgym.make("coin").bonus, mrgym.make("coin", bonus=3).bonus] == [1, 3]

    def test_the_environment_knows_its_id(self):
        mrgym.register("mine/coin", Coin)
        env = mrgym.make("mine/coin")
        assert (env.spec.id, env.contract_name) == ("mine/coin-v1", "mine/coin-v1")

    def test_every_env_is_a_new_one(self):
        mrgym.register("coin", Coin)
        assert mrgym.make("coin") is not mrgym.make("coin")

    def test_listed_ids_have_versions_and_an_order(self):
        mrgym.register("tails", Coin)
        mrgym.register("coin-v3", Coin)
        ids = mrgym.list_envs()
        assert {"tails-v1", "coin-v3", "math_multi_reward-v1"} <= {*ids}
        assert ids == sorted(ids)


class TestUnknown:
    @pytest.mark.parametrize(
        ("env_id", "meant"),
        [("cion", "coin"), ("coins", "coin"), ("math_multireward", "math_multi_reward")],
    )
    def test_a_near_name_is_suggested(self, env_id, meant):
        mrgym.register("coin", Coin)
        with pytest.raises(RegistryError, match=rf"unknown environment '{env_id}'.*mean '{meant}"):
            mrgym.make(env_id)

    @pytest.mark.parametrize("env_id", ["coin-v2", "other/coin", "", "Coin", "coin-v"])
    def test_nothing_is_guessed(self, env_id):
        mrgym.register("coin", Coin)
        with pytest.raises(RegistryError, match=r"unknown environment"):
            mrgym.make(env_id)

    @pytest.mark.parametrize(
        ("path", "said"),
        [
            ("no_such_pkg.module:Coin", r"expected an importable module 'no_such_pkg\.module'"),
            ("mrgym.no_such:Coin", r"expected an importable module 'mrgym\.no_such'"),
            (f"{__name__}:Coinn", r"to define 'Coinn'; did you mean 'Coin'"),
            (f"{__name__}:", r"to define ''"),
            (":Coin", r"expected an importable module"),
            ("..sibling:Coin", r"expected an importable module"),
            ("os:sep", r"got 'os:sep' \(str\), expected a class or function"),
        ],
    )
    def test_a_path_that_leads_nowhere_is_an_error(self, path, said):
        with pytest.raises(RegistryError, match=said):
            mrgym.make(path)

    @pytest.mark.parametrize("address", ["ftp://host/x", "HTTPX://host", "://host", "file:///x"])
    def test_an_address_of_another_kind_is_refused_as_one(self, address):
        with pytest.raises(ConfigError, match=r"got address .*, expected http://host:port or"):
            mrgym.make(address)

    def test_the_docstring_names_every_argument_of_a_service(self):
        names = [*inspect.signature(mrgym.remote.connect).parameters][1:]
        assert [name for name in names if f"``{name}``" not in mrgym.make.__doc__] == []

    @pytest.mark.parametrize("address", ["HTTP://127.0.0.1:1", "Https://127.0.0.1:1"])
    def test_the_case_of_an_addresss_scheme_does_not_matter(self, address):
        with pytest.raises(RemoteError, match=r"got ConnectError"):
            mrgym.make(address, retries=0)

    @pytest.mark.parametrize(
        ("body", "error"),
        [("import absent_dependency", ModuleNotFoundError), ("int('absent_d')", ValueError)],
    )
    def test_a_module_that_fails_to_import_says_why(self, tmp_path, monkeypatch, body, error):
        (tmp_path / "broken_module.py").write_text(body)
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(error, match=r"absent_d"):
            mrgym.make("broken_module:Env")

    @pytest.mark.parametrize("env_id", ["requests_env", "no_such_pkg.module:Coin"])
    def test_nothing_is_installed_on_demand(self, env_id, monkeypatch):
        """PrimeIntellect-ai/verifiers#329; #1934."""

        def forbidden(*args, **options):
            raise AssertionError(f"started {args}")

        monkeypatch.setattr(subprocess, "Popen", forbidden)
        monkeypatch.setattr(os, "system", forbidden)
        monkeypatch.setattr(os, "posix_spawn", forbidden)
        with pytest.raises(RegistryError):
            mrgym.make(env_id)


class TestRegister:
    """PrimeIntellect-ai/verifiers#329; #1934."""

    @pytest.mark.parametrize("again", ["coin", "coin-v1"])
    def test_an_id_twice_names_who_has_it(self, again):
        mrgym.register("coin", Coin)
        with pytest.raises(RegistryError, match=r"'coin-v1', already taken by .*Coin"):
            mrgym.register(again, coin)

    def test_an_installed_id_is_taken_as_well(self):
        with pytest.raises(RegistryError, match=r"already taken by mrgym_envs\.math_multi_reward"):
            mrgym.register("math_multi_reward", Coin)

    @pytest.mark.parametrize("env_id", ["numpy", "numpy-v1", "random", "json-v3", "sys", "mrgym"])
    def test_an_id_that_shadows_a_module_names_the_module(self, env_id):
        name = env_id.split("-")[0]
        with pytest.raises(RegistryError, match=rf"shadows the installed module '{name}'"):
            mrgym.register(env_id, Coin)

    def test_a_namespace_or_its_own_module_is_no_shadow(self, tmp_path, monkeypatch):
        (tmp_path / "tower_module.py").write_text("")
        (tmp_path / "just_a_folder").mkdir()
        monkeypatch.syspath_prepend(tmp_path)
        for env_id in ("mine/numpy", "just_a_folder"):
            assert mrgym.make(mrgym.register(env_id, Coin).id).bonus == 0.5
        assert mrgym.register("tower_module", "tower_module:Env").id == "tower_module-v1"

    @pytest.mark.parametrize(
        "env_id",
        ["", "two words", "1coin", "coin-1", "coin-v", "a/b/c", "coin.v1", "-v1", "coin:x"],
    )
    def test_a_malformed_id_is_refused(self, env_id):
        with pytest.raises(RegistryError, match=r"expected 'name' or 'name-vN'"):
            mrgym.register(env_id, Coin)


class TestWhatIsMade:
    def test_a_plain_gymnasium_env_is_refused_with_the_way_out(self):
        mrgym.register("plain", plain)
        with pytest.raises(RegistryError, match=r"plain-v1: got .*mrgym\.from_gymnasium\(env\)"):
            mrgym.make("plain")

    def test_a_wrapped_one_is_refused_with_another_way_out(self):
        mrgym.register("limited", limited)
        with pytest.raises(RegistryError, match=r"got TimeLimit.*Coin.*wrap it after make"):
            mrgym.make("limited")

    @pytest.mark.parametrize("result", [None, 3, "coin"], ids=repr)
    def test_no_env_at_all(self, result):
        mrgym.register("nothing", lambda: result)
        with pytest.raises(RegistryError, match=r"subclass mrgym\.MultiRewardEnv"):
            mrgym.make("nothing")

    @pytest.mark.parametrize(
        ("kwargs", "said"),
        [({"bonsu": 1}, r"did you mean 'bonus'"), ({"x": 1}, r"expected some of \['bonus'\]")],
    )
    @pytest.mark.parametrize("env_id", ["coin", HERE])
    def test_unknown_arguments_are_named(self, env_id, kwargs, said):
        mrgym.register("coin", Coin)
        with pytest.raises(RegistryError, match=said):
            mrgym.make(env_id, **kwargs)

    @pytest.mark.parametrize("kwargs", [{"dificulty": "easy"}, {"taks": []}])
    def test_so_are_those_of_bundled_environments(self, kwargs):
        with pytest.raises(RegistryError, match=r"math_multi_reward-v1: got.*did you mean"):
            mrgym.make("math_multi_reward", **kwargs)

    def test_a_missing_argument_is_named(self):
        mrgym.register("needy", lambda size: Coin())
        with pytest.raises(RegistryError, match=r"missing a required argument: 'size'"):
            mrgym.make("needy")


class TestMakeVec:
    @pytest.mark.parametrize("mode", ["sync", "async"])
    @pytest.mark.parametrize("bonus", [0.5, 1])
    def test_components_travel(self, mode, bonus):
        """NVIDIA-NeMo/RL#2892; NVIDIA-NeMo/Gym#1664."""
        mrgym.register("coin", Coin)
        vector = mrgym.make_vec("coin", 3, mode=mode, bonus=bonus)
        try:
            vector.reset(seed=0)
            _, rewards, _, _, infos = vector.step([1, 0, 1])
            assert infos["reward_components"]["right"].tolist() == [1.0, 0.0, 1.0]
            assert infos["reward_components"]["bonus"].tolist() == [bonus] * 3
            assert rewards.tolist() == [1 + bonus, bonus, 1 + bonus]
        finally:
            vector.close()

    def test_by_class_path_and_with_vector_arguments(self):
        mode = gym.vector.AutoresetMode.SAME_STEP
        vector = mrgym.make_vec(HERE, 2, vector_kwargs={"autoreset_mode": mode})
        vector.reset(seed=0)
        infos = vector.step([1, 0])[4]
        assert infos["final_info"]["reward_components"]["right"].tolist() == [1.0, 0.0]

    @pytest.mark.parametrize("mode", ["asynch", "", None, "vector"])
    def test_an_unknown_mode_is_refused(self, mode):
        mrgym.register("coin", Coin)
        with pytest.raises(mrgym.ConfigError, match=r"mode=.*expected 'sync' or 'async'"):
            mrgym.make_vec("coin", 2, mode=mode)

    def test_an_unknown_id_is_refused_before_anything_starts(self):
        with pytest.raises(RegistryError, match=r"unknown environment"):
            mrgym.make_vec("cion", 2, mode="async")


PACKAGE = """
import gymnasium, mrgym

class Tower(mrgym.MultiRewardEnv):
    components = mrgym.components(stable=mrgym.Component(low=0, high=1))
    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return self.emit(0, {"stable": action}, terminated=True)
"""


def install(folder, name, entry_points):
    """Lay a package out as an installer does: a module and a dist-info folder."""
    (folder / f"{name}.py").write_text(PACKAGE)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mrgym.envs]\n{entry_points}\n")


def run(folder, code):
    """Run code in a fresh interpreter that finds the packages of a folder."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )


class TestInstalledPackages:
    def test_an_entry_point_is_enough(self, tmp_path):
        install(tmp_path, "towers", "tower = towers:Tower\ntower-v2 = towers:Tower")
        code = (
            "import sys, mrgym; ids = mrgym.list_envs(); "
            "print({'tower-v1', 'tower-v2'} <= {*ids}, 'towers' in sys.modules); "
            "env = mrgym.make('tower'); env.reset(seed=0); "
            "print(env.spec.id, env.step(1)[4], mrgym.check_env(env).ok)"
        )
        out = run(tmp_path, code)
        said = ["True False", "tower-v2 {'reward_components': {'stable': 1.0}} True"]
        assert out.stdout.splitlines() == said, out.stderr

    def test_two_packages_with_one_id_are_both_named(self, tmp_path):
        """PrimeIntellect-ai/verifiers#329; #1934."""
        install(tmp_path, "towers", "tower = towers:Tower")
        install(tmp_path, "castles", "tower-v1 = castles:Tower")
        out = run(tmp_path, "import mrgym; mrgym.make('tower')")
        assert "'tower-v1' from installed packages twice" in out.stderr
        assert "towers:Tower" in out.stderr
        assert "castles:Tower" in out.stderr

    def test_another_packages_trouble_does_not_touch_other_ids(self, tmp_path):
        install(tmp_path, "towers", "tower = towers:Tower")
        install(tmp_path, "castles", "tower-v1 = castles:Tower")
        install(tmp_path, "broken", "not an id = broken:Env")
        out = run(tmp_path, "import mrgym; mrgym.make('math_multi_reward'); mrgym.list_envs()")
        assert out.returncode == 0, out.stderr
        assert "entry point 'not an id' is left out" in out.stderr
