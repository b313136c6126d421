"""What the documents show is what happens: every Python block runs, every named file exists."""

from __future__ import annotations

import importlib
import itertools
import re
import runpy
import shlex
from pathlib import Path

import pytest

from cli_helpers import fedauc

ROOT = Path(__file__).parents[2]
SERVER_UNIT = ROOT / "src" / "fedauc" / "federation" / "deploy_template" / "server.service"
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if blocks(p, "python")], ids=lambda path: path.name)
def test_the_examples_run(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The blocks of a document are one program, run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "example.py"
    program.write_text("\n".join(blocks(path, "python")))
    runpy.run_path(str(program), run_name="example")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_a_document_names_exists(path: Path) -> None:
    """Names in backquotes that look like a path of the project, with or without src/fedauc/ before them."""
    named = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]*(?:\.py|\.md|/)|[\w-]+\.py)(?::[\w.]+)?`", path.read_text()))
    roots = [ROOT, ROOT / "src", ROOT / "src" / "fedauc", ROOT / "tests"]
    missing = {name for name in named if not any((root / name).exists() for root in roots)}
    assert missing == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_name_a_document_gives_of_a_file_exists(path: Path) -> None:
    """`file.py:Class.method` names something that is there."""
    for file, name in re.findall(r"`((?:\w+/)*\w+)\.py:([\w.]+)`", path.read_text()):
        value: object = importlib.import_module("fedauc." + file.replace("/", "."))
        for part in name.split("."):
            assert hasattr(value, part) or part in getattr(value, "__annotations__", {}), f"{file}.py:{name}"
            value = getattr(value, part, None)


def test_the_readme_example_is_short() -> None:
    """At most 15 lines of code on the first screen."""
    first = blocks(ROOT / "README.md", "python")[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 15


def list_commands(path: Path) -> list[list[str]]:
    """The `fedauc` commands of a document's shell blocks, as words; continued lines count as one."""
    lines = "\n".join(blocks(path, "sh")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("fedauc ")]


def test_the_readme_commands_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All of them, one after the other in an empty folder, with one cycle each instead of thirty."""
    monkeypatch.chdir(tmp_path)
    commands = list_commands(ROOT / "README.md")
    assert len(commands) >= 5
    for _, verb, *words in commands:
        shortened = ["1" if before == "--cycles" else word for before, word in zip(["", *words], words, strict=False)]
        if verb in ("run", "compare", "sweep") and "--cycles" not in words:
            shortened += ["--cycles", "1"]
        done = fedauc(capsys, verb, *shortened)
        assert done.code == 0, f"fedauc {verb} {' '.join(words)}: {done.err}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_installs_what_its_reports_need(path: Path) -> None:
    installed = re.findall(r"^pip install .*'\.\[(.*)\]'", "\n".join(blocks(path, "sh")), flags=re.MULTILINE)
    if installed and any(words[1] in ("report", "board") for words in list_commands(path)):
        assert "report" in ",".join(installed).split(",")


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if list_commands(p)], ids=lambda path: path.name)
def test_the_commands_of_a_document_exist(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every option that a document's command uses is in the help of that command."""
    monkeypatch.setenv("COLUMNS", "200")
    for _, *words in list_commands(path):
        # It may stand before any command.
        if words[0] == "--plugin":
            words = words[2:]
        verbs = list(itertools.takewhile(lambda word: re.fullmatch(r"[a-z]+", word), words))
        depth = 3 if verbs[:2] == ["federation", "nvflare"] else 2 if verbs[:1] in (["data"], ["federation"]) else 1
        verbs = verbs[:depth]
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        shown = fedauc(capsys, *verbs, "--help")
        assert shown.code == 0, words
        known = set(re.findall(r"--[\w.-]+", shown.out))
        if verbs == ["federation", "superlink"]:
            # These are Flower's, with which `make test-deploy` compares those of the unit.
            known |= set(re.findall(r"--[\w.-]+", SERVER_UNIT.read_text()))
        assert options <= known, f"{' '.join(words)}: {options - known}"
