"""A package in a temporary folder that has one member of each kind works in every command, installed or named.

All commands run in processes of their own, which find the library and the package through PYTHONPATH alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedauc.cli.training import LISTS

ROOT = Path(__file__).parents[2]

OPTIONS = {
    "--method": "own-method",
    "--data": "own-data",
    "--partition": "own-partition",
    "--model": "own-model",
    "--objective": "own-loss",
    "--stages": "own-stages",
    "--wrappers": "own-wrapper",
    "--transforms": "own-transform",
    "--mean": "own-mean",
    "--server-optimizer": "own-optimizer",
    "--metrics": "auc,ap,own-metric",
    "--callbacks": "own-callback",
}
"""A member of each kind; the schedule is that of the method."""

WORDS = [*(word for pair in OPTIONS.items() for word in pair), "--cycles", "3", "--local-steps", "2"]

SUITES = """
import own_members as own
from fedauc import testing
testing.check_algorithm(own.OwnAlgorithm(beta=0.3))
testing.check_objective(own.OwnLoss(margin=2.0))
testing.check_participation(own.OwnParticipation())
testing.check_dataset(own.OwnData())
testing.check_partition(own.OwnPartition())
testing.check_model(own.OwnModel())
testing.check_stage_rule(own.OwnStages())
testing.check_wrapper(own.OwnWrapper())
testing.check_transform(own.OwnTransform())
testing.check_mean(own.OwnMean())
testing.check_server_optimizer(own.OwnOptimizer())
testing.check_metric(own.OwnMetric())
testing.check_callback(own.OwnCallback())
print("passed")
"""

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(params=["named", pytest.param("installed", marks=pytest.mark.slow)])
def way(request: pytest.FixtureRequest) -> str:
    """How the package is found: by its entry point, or by its module's name."""
    return str(request.param)


@pytest.fixture
def command(way: str, tmp_path: Path) -> Command:
    """Runs `fedauc ...` in the temporary folder; a named plug-in is given with --plugin, unless `plugin` says no."""
    folder = tmp_path / ("packages" if way == "installed" else ".")
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / "tests" / "own_members.py", folder)
    if way == "installed":
        info = folder / "own_package-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-package\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text("[fedauc.plugins]\nown = own_members\n")

    def run(
        *words: str, plugin: bool = True, cwd: Path = tmp_path, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        paths = [str(ROOT / "src"), str(ROOT), *([str(folder)] if way == "installed" else [])]
        inherited = {name: value for name, value in os.environ.items() if name != "FEDAUC_PLUGINS"}
        environment = {**inherited, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
        program = ["-m", "fedauc"] if words[0] not in ("-c", "-m") else []
        given = ["--plugin", "own_members"] if plugin and program and way == "named" else []
        return subprocess.run(
            [sys.executable, *program, *given, *words],
            cwd=cwd,
            env={**environment, **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_a_run_with_one_member_of_each_kind_is_interrupted_and_resumed_to_the_same_records(
    command: Command, way: str, tmp_path: Path
) -> None:
    uninterrupted = command("run", *WORDS, "--out", "uninterrupted")
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    records = (tmp_path / "uninterrupted" / "records.jsonl").read_text()
    assert "own-metric" in records
    stopped = command("run", *WORDS, "--out", "stopped", OWN_INTERRUPT="3")
    assert stopped.returncode == 130, stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert len((tmp_path / "stopped" / "records.jsonl").read_text()) < len(records)
    # The folder knows which plug-in its configuration uses.
    resumed = command("resume", "stopped", plugin=False)
    assert resumed.returncode == 0, resumed.stderr
    assert (tmp_path / "stopped" / "records.jsonl").read_text() == records
    config = json.loads((tmp_path / "stopped" / "config.json").read_text())
    environment = json.loads((tmp_path / "stopped" / "environment.json").read_text())
    assert config["plugins"] == {"own_members": "own-package" if way == "installed" else None}
    assert environment["plugins"] == {"own_members": "own-package 1.2" if way == "installed" else None}
    again = command("run", "--config", "stopped/config.json", "--out", "again", plugin=False)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again" / "records.jsonl").read_text() == records
    shown = command("show", "stopped", plugin=False)
    assert shown.returncode == 0, shown.stderr


def test_a_resumed_run_says_which_plugin_it_lacks(command: Command, way: str, tmp_path: Path) -> None:
    assert command("run", *WORDS, "--cycles", "1", "--out", "run").returncode == 0
    folder = tmp_path / ("packages" if way == "installed" else ".")
    (folder / "own_members.py").rename(tmp_path / "elsewhere.py")
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    lost = command("resume", "run", plugin=False)
    assert lost.returncode == 2
    line = lost.stderr.splitlines()[-1]
    assert line.startswith("error: configuration run/config.json has an unknown method 'own-method', because there is")
    assert "no plug-in module 'own_members' here; install the package that has it, add its folder to PYTHONPATH" in line
    assert line.endswith("it belonged to the package own-package") == (way == "installed")
    broken = "note: the installed package own-package 1.2 cannot be used" in " ".join(lost.stderr.split())
    assert broken == (way == "installed")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["installed"], indirect=True)
def test_sweeps_and_comparisons_train_own_members_and_resume(command: Command, tmp_path: Path) -> None:
    swept = command("sweep", *WORDS, "--vary", "objective.margin=1,2", "--seeds", "0,1", "--out", "sweep")
    assert swept.returncode == 0, swept.stderr
    assert len(list((tmp_path / "sweep").rglob("result.json"))) == 4
    words = ["--methods", "own-method,cycp-fedavg", *WORDS[2:], "--participation", "own-schedule"]
    compared = command("compare", *words, "--out", "both")
    assert compared.returncode == 0, compared.stderr
    records = (tmp_path / "both/own-method/seed-0/records.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "both/own-method")
    resumed = command("resume", "both", plugin=False)
    assert resumed.returncode == 0, resumed.stderr
    assert (tmp_path / "both/own-method/seed-0/records.jsonl").read_bytes() == records


@pytest.mark.parametrize("way", ["named"], indirect=True)
def test_lists_show_own_members_and_where_they_come_from(command: Command) -> None:
    for what in sorted(set(LISTS) - {"engines", "presets"}):
        listed = command("list", what)
        assert listed.returncode == 0, listed.stderr
        header, *lines = listed.stdout.splitlines()
        assert header.split()[-1] == "from"
        assert [line.split()[-1] for line in lines if line.startswith("own-")] == ["own_members"], what
    helped = command("run", "--help")
    assert "--objective.margin" in helped.stdout
    assert "own-loss" in helped.stdout


@pytest.mark.parametrize("way", ["named"], indirect=True)
def test_own_members_pass_the_exported_suites(command: Command) -> None:
    checked = command("-c", SUITES)
    assert checked.stdout == "passed\n", checked.stderr


@pytest.mark.parametrize("way", ["named"], indirect=True)
def test_an_own_method_is_a_row_of_the_papers_tables(command: Command) -> None:
    words = ("-m", "paper", "table1", "--scale", "smoke", "--methods", "cycp-fedavg", "--plugin", "own_members")
    made = command(*words, "--columns", "cifar10", "--row", "mine=own-method", "--seeds", "0", "--tuning", "none")
    assert made.returncode == 0, made.stderr
    assert re.search(r"^mine +\.\d{4}", made.stdout, re.MULTILINE)
    shown = command("-m", "paper", "show", "table1", "--scale", "smoke")
    assert shown.returncode == 2
    assert "unknown method 'own-method'" in shown.stderr
    assert "if it is your own, nothing is damaged: name its module with --plugin" in shown.stderr


def test_help_and_version_do_not_import_plugins(command: Command, tmp_path: Path, way: str) -> None:
    folder = tmp_path / ("packages" if way == "installed" else ".")
    (folder / "own_members.py").write_text("raise RuntimeError('imported')\n")
    for words in (("--version",), ("--help",), ("show", "--help"), ("resume", "--help")):
        done = command(*words)
        assert (done.returncode, done.stderr) == (0, ""), words
    listed = command("list", "objectives")
    assert listed.returncode == (0 if way == "installed" else 2)
    assert "Traceback" not in listed.stderr
    assert "cannot be imported: RuntimeError: imported (own_members.py, line 1)" in " ".join(listed.stderr.split())
    assert len(listed.stderr.splitlines()) <= 2
