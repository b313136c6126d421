"""Shell completion: a real bash completes commands, options and names, without loading torch."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli_helpers import fedauc
from fedauc.cli import GROUPS
from fedauc.cli.completion import sketch_group

PROGRAM = """#!{python}
import sys
from fedauc.__main__ import main
try:
    main()
finally:
    assert "torch._C" not in sys.modules, "torch is loaded"
    assert "numpy._core" not in sys.modules, "numpy is loaded"
"""


def complete(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str, shell: str = "bash"
) -> list[str]:
    """What a shell is told when the tab key is pressed at the end of the last word."""
    line = " ".join(["fedauc", *words])
    if shell == "bash":
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
    else:
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("_FEDAUC_COMPLETE", f"complete_{shell}")
    return fedauc(capsys).out.splitlines()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("sho",), ["show"]),
        (("run", "--method", "cycp-m"), ["cycp-minimax"]),
        (("compare", "--methods", "fedavg,cycp-p"), ["fedavg,cycp-pairwise"]),
        (("run", "--data", "synth"), ["synthetic", "synthetic-tokens"]),
        (("run", "--model", "lin"), ["linear"]),
        (("run", "--transforms", "clip,q"), ["clip,quantize"]),
        (("run", "--engine", "b"), ["batched"]),
        (("run", "--keep", ""), ["last", "best"]),
        (("run", "--objective.sc"), ["--objective.scale"]),
        (("list", "server"), ["server-optimizers"]),
        (("federation", "in"), ["init"]),
    ],
    ids=" ".join,
)
def test_names_are_completed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: list[str]
) -> None:
    assert complete(capsys, monkeypatch, *words) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_served_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    told = complete(capsys, monkeypatch, "run", "--method", "cycp-m", shell=shell)
    assert "cycp-minimax" in " ".join(told)
    assert "cycp-pairwise" not in " ".join(told)


@pytest.mark.parametrize("name", GROUPS)
def test_the_commands_of_a_group_are_known_without_importing_it(name: str) -> None:
    commands = importlib.import_module(f"fedauc.cli.{name}").app.registered_commands
    names = {command.name or command.callback.__name__.replace("_", "-") for command in commands}
    assert {command.name for command in sketch_group(name).registered_commands} == names


def test_bash_completes_through_the_script_that_is_installed(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    program = tmp_path / "fedauc"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    script = """
source <(fedauc --show-completion bash)
COMP_WORDS=(fedauc run --method cycp-fedavg-)
COMP_CWORD=3
_fedauc_completion fedauc
echo "${COMPREPLY[@]}"
"""
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": paths}
    done = subprocess.run([bash, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.split() == ["cycp-fedavg-balanced", "cycp-fedavg-focal", "cycp-fedavg-logit-adjusted"]
