"""Wheel and source distribution: the same bytes twice, and a wheel in an empty environment that trains.

They build, install and train for minutes: `make test-packaging`.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[2]

PURE = ["fields", "files", "plugins", "progress", "version"]
"""Modules without torch and numpy, which every interpreter can run."""

README_JOURNEY = re.compile(r"^From a table to a decision.*?^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""The first commands of the README."""

OFFLINE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
"""Nothing answers there."""


def build(out: Path) -> dict[str, str]:
    """Build both files; their hashes by name."""
    command = [sys.executable, str(ROOT / "packaging" / "build_distributions.py"), str(out)]
    subprocess.run(command, check=True, capture_output=True)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    build(out)
    return out


def test_two_builds_have_the_same_bytes(distributions: Path, tmp_path: Path) -> None:
    first = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(distributions.iterdir())}
    assert build(tmp_path) == first
    assert sorted(Path(name).suffix for name in first) == [".gz", ".whl"]


def test_the_files_hold_the_library_and_nothing_else(distributions: Path) -> None:
    (wheel,), (source,) = distributions.glob("*.whl"), distributions.glob("*.tar.gz")
    roots = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"fedauc"}
    assert "fedauc/py.typed" in zipfile.ZipFile(wheel).namelist()
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/fedauc/__init__.py"} <= names
    assert not [name for name in names if name.startswith((".venv", "runs", "paper/records"))]


Command = Callable[..., str]


@pytest.fixture(scope="module")
def installed_command(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Runs `fedauc ...` in a folder, from the wheel in an empty environment, without network."""
    (wheel,) = distributions.glob("*.whl")
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    requirement = f"{wheel}[cli,frames,report,export]"
    installed = subprocess.run(
        [*pip, "-c", str(ROOT / "constraints.txt"), requirement], capture_output=True, text=True, check=False
    )
    assert installed.returncode == 0, installed.stderr
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | OFFLINE

    def run_command(where: Path, *words: str) -> str:
        command = [str(folder / "bin" / "fedauc"), *words]
        done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run_command


def test_the_wheel_in_an_empty_environment_runs_the_demo_without_network(
    installed_command: Command, tmp_path: Path
) -> None:
    words = ["compare", "--methods", "cycp-fedavg,cycp-minimax,cycp-pairwise", "--cycles", "3", "--out", "runs/demo"]
    for arguments in (words, ["show", "runs/demo"], ["doctor"]):
        installed_command(tmp_path, *arguments)
    assert (tmp_path / "runs" / "demo" / "curves.png").is_file()


def test_a_csv_file_becomes_scores_a_report_and_an_exported_model(installed_command: Command, tmp_path: Path) -> None:
    """The commands of README.md, in which a table becomes a decision, and an export."""
    shell = README_JOURNEY.search((ROOT / "README.md").read_text())
    assert shell is not None
    lines = shell.group(1).replace("\\\n", " ").splitlines()
    for line in [*lines, "fedauc export runs/claims --to onnx --out exported"]:
        _, *words = shlex.split(line, comments=True)
        installed_command(tmp_path, *words)
    with (tmp_path / "scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 500
    assert {row["decision"] for row in rows} == {"yes", "no"}
    assert all(0 <= float(row["probability"]) <= 1 for row in rows)
    assert (tmp_path / "report.html").stat().st_size > 100_000
    assert (tmp_path / "exported" / "model.onnx").is_file()


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_every_python_compiles_the_sources_and_runs_what_needs_no_torch(version: str, tmp_path: Path) -> None:
    """A whole test run needs a torch for that Python; `make test PYTHON=python3.12` makes one where it can be had."""
    folders = glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin"))
    python = next(filter(None, (shutil.which(f"python{version}", path=folder) for folder in folders)), None)
    python = python or shutil.which(f"python{version}")
    if python is None:
        pytest.skip(f"there is no python{version} here")
    shutil.copytree(ROOT / "src", tmp_path / "src")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    compiled = [python, "-W", "error", "-m", "compileall", "-q", "-f", str(tmp_path / "src")]
    subprocess.run(compiled, check=True, env=environment, capture_output=True)
    for module in PURE:
        program = f"import doctest, sys, fedauc.{module}; sys.exit(doctest.testmod(fedauc.{module}).failed)"
        done = subprocess.run([python, "-W", "error", "-c", program], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
