"""The built wheel and sdist, used as a stranger would: installed away from the checkout.

Two virtual environments see links to the packages that mrgym's metadata asks for and no others:
``core`` has no extra, hence no torch; ``full`` has ``mrgym[train,data]``. Nothing is fetched.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "mrgym": ROOT / "mrgym",
    "mrgym_envs": ROOT / "envs" / "mrgym_envs",
    "mrgym_trainers": ROOT / "trainers" / "mrgym_trainers",
}
CONSUMER = ROOT / "tests" / "packaging" / "consumer.py"
TRAINING_CONSUMER = CONSUMER.with_name("consumer_training.py")
EXTRAS = ["datasets", "jinja2", "matplotlib", "torch", "transformers", "yaml"]

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Installation:
    """A virtual environment with the wheel in it.

    Attributes:
        bin: Where its commands are.
        cwd: An empty folder to work in.
    """

    bin: Path
    cwd: Path

    def run(self, command: str, *args: str | Path, cwd: Path | None = None) -> str:
        """Run one of its commands and return what it printed."""
        result = self.attempt(command, *args, cwd=cwd)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def attempt(
        self, command: str, *args: str | Path, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run one of its commands, whatever comes of it."""
        return run([self.bin / command, *args], cwd=cwd or self.cwd)


def run(command: list[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that is told nothing of the checkout by its surroundings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MYPY", "COLUMNS"))}
    return subprocess.run(
        command,
        cwd=cwd,
        env={**kept, "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    result = run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT], cwd=out)
    assert result.returncode == 0, result.stdout + result.stderr
    return out


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    return next(built.glob("mrgym-*.whl"))


@pytest.fixture(scope="session")
def wheel_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="session")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """What ``pip install mrgym`` gives."""
    return install(wheel, set(), tmp_path_factory.mktemp("core"))


@pytest.fixture(scope="session")
def full(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """What ``pip install 'mrgym[train,data]'`` gives."""
    return install(wheel, {"train", "data"}, tmp_path_factory.mktemp("full"))


def install(wheel: Path, extras: set[str], folder: Path) -> Installation:
    venv.create(folder / "venv", with_pip=True, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    asked = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder)
    site_packages = Path(asked.stdout.strip())
    for dependency in dependencies(read_requirements(wheel), extras):
        link(dependency, site_packages)
    pip = run([python, "-m", "pip", "install", "--no-deps", "--no-index", wheel], folder)
    assert pip.returncode == 0, pip.stdout + pip.stderr
    (folder / "work").mkdir()
    return Installation(python.parent, folder / "work")


def read_requirements(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    return [Requirement(line) for line in re.findall(r"^Requires-Dist: (.*)$", metadata, re.M)]


def dependencies(requirements: list[Requirement], extras: set[str]) -> Iterator[Distribution]:
    """Yield the installed distributions that requirements ask for, directly or not."""
    seen: set[tuple[str, str]] = set()
    waiting = [(requirement, extras) for requirement in requirements]
    while waiting:
        requirement, wanted = waiting.pop()
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in ["", *wanted]):
            continue
        found = distribution(requirement.name)
        own = [Requirement(text) for text in found.requires or []]
        for extra in ["", *requirement.extras]:
            if (found.metadata["Name"], extra) not in seen:
                seen.add((found.metadata["Name"], extra))
                waiting += [(each, {extra}) for each in own]
                yield found


def link(dependency: Distribution, site_packages: Path) -> None:
    """Make an installed distribution, its metadata included, visible in another environment."""
    tops = {file.parts[0] for file in dependency.files or []} - {"..", "__pycache__"}
    for top in tops:
        target = site_packages / top
        if not target.exists() and not top.endswith(".pth"):
            target.symlink_to(str(dependency.locate_file(top)))


def test_wheel_holds_every_file_of_the_three_packages_and_no_other(wheel_files: set[str]) -> None:
    expected = {
        f"{name}/{file.relative_to(folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {file for file in wheel_files if ".dist-info/" not in file} == expected


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_marks_its_packages_as_typed(wheel_files: set[str], package: str) -> None:
    assert f"{package}/py.typed" in wheel_files


@pytest.mark.parametrize(
    "pattern",
    [
        r"mrgym_trainers/tiny_policy/.*\.safetensors",
        r"mrgym_trainers/tiny_policy/.*tokenizer\.json",
        r"mrgym_trainers/report/template\.html\.j2",
        r"mrgym-[\d.]+\.dist-info/licenses/LICENSE",
    ],
)
def test_wheel_holds_what_is_not_python(wheel_files: set[str], pattern: str) -> None:
    assert any(re.fullmatch(pattern, file) for file in wheel_files)


def test_every_bundled_environment_ships_its_readme(wheel_files: set[str]) -> None:
    folders = {file.rsplit("/", 1)[0] for file in wheel_files if file.endswith("/env.py")}
    bundled = {folder for folder in folders if folder.startswith("mrgym_envs/")}
    assert bundled
    assert {folder for folder in bundled if f"{folder}/README.md" not in wheel_files} == set()


def test_sdist_can_be_worked_in(built: Path) -> None:
    with tarfile.open(next(built.glob("mrgym-*.tar.gz"))) as archive:
        files = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = {"Makefile", "constraints.txt", "LICENSE", "README.md", "CONTRIBUTING.md"}
    assert wanted <= files
    assert "tests/packaging/test_wheel.py" in files
    assert not {file for file in files if file.startswith(("runs/", "dist/", ".venv/"))}


def test_bare_install_works_without_the_extras(core: Installation) -> None:
    program = (
        "import mrgym, mrgym_envs, mrgym_trainers\n"
        "from importlib.util import find_spec\n"
        "mrgym.make('math_multi_reward').reset(seed=0)\n"
        f"print([name for name in {EXTRAS} if find_spec(name)])\n"
        "print(mrgym.__file__, mrgym_envs.__file__, mrgym_trainers.__file__, sep='\\n')"
    )
    extras, *files = core.run("python", "-c", program).splitlines()
    assert extras == "[]"
    for file in files:
        assert Path(file).is_relative_to(core.bin.parent), f"not the installed wheel: {file}"


def test_consumer_runs_on_a_bare_install(core: Installation) -> None:
    assert core.run("python", CONSUMER) == "consumer ok\n"


def test_consumer_passes_strict_mypy_on_a_bare_install(core: Installation) -> None:
    check_types(core, CONSUMER)


def test_training_consumer_runs_on_a_full_install(full: Installation) -> None:
    assert full.run("python", TRAINING_CONSUMER, full.cwd / "consumer") == "consumer ok\n"


def test_consumers_pass_strict_mypy_on_a_full_install(full: Installation) -> None:
    check_types(full, CONSUMER, TRAINING_CONSUMER)


def check_types(installation: Installation, *files: Path) -> None:
    python = installation.bin / "python"
    mypy = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", "mypy"]
    result = run([*mypy, "--python-executable", python, *files], cwd=installation.cwd)
    assert result.returncode == 0, result.stdout + result.stderr


def test_bare_install_lists_its_environments(core: Installation) -> None:
    assert "math_multi_reward" in core.run("mrgym", "list")


def test_bare_install_says_how_to_get_what_training_needs(core: Installation) -> None:
    result = core.attempt("mrgym", "train", "math_multi_reward", "--out", "run")
    assert result.returncode in (1, 2)
    lines = (result.stdout + result.stderr).strip().splitlines()
    assert len(lines) == 1, lines
    assert "pip install 'mrgym[train]'" in lines[0]
    assert not (core.cwd / "run").exists()


def test_full_install_trains(full: Installation) -> None:
    full.run("mrgym", "train", "math_multi_reward", "--out", "run", "steps=1", "eval_tasks=8")
    assert (full.cwd / "run" / "summary.json").is_file()
    assert (full.cwd / "run" / "report.html").is_file()


@pytest.mark.parametrize("installation", ["wheel", "editable"])
@pytest.mark.parametrize("regular", [True, False], ids=["package", "namespace"])
def test_own_envs_and_trainers_folders_do_not_clash(
    installation: str, regular: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    for name in ("envs", "trainers", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("here = True\n")
        if regular:
            (tmp_path / name / "__init__.py").touch()
    program = (
        "import envs.mine, trainers.mine, tests.mine, mrgym, mrgym_envs, mrgym_trainers\n"
        "assert envs.mine.here and trainers.mine.here and tests.mine.here\n"
        "mrgym.make('math_multi_reward')\n"
    )
    python: str | Path = sys.executable
    if installation == "wheel":
        python = request.getfixturevalue("core").bin / "python"
    result = run([python, "-c", program], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
