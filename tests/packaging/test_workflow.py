"""The workflow file, the pre-commit hooks and `make test` run the same commands."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_workflow_runs_what_runs_before_a_change_lands() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert re.findall(r"^\s*- run: (.+)$", workflow, re.MULTILINE) == [".ci/run"]
    script = (ROOT / ".ci/run").read_text()
    assert script.splitlines()[-1] == "make test"
    assert (ROOT / ".ci/run").stat().st_mode & 0o100


def test_the_audit_is_a_workflow_of_its_own() -> None:
    """It needs a network, which `make test` does not."""
    workflow = (ROOT / ".github/workflows/audit.yml").read_text()
    assert re.findall(r"^\s*- run: (.+)$", workflow, re.MULTILINE) == ["make audit"]
    assert re.search(r"^audit:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "-o dist/sbom.cdx.json" in (ROOT / "Makefile").read_text()


def test_nightly_jobs_are_make_targets() -> None:
    workflow = (ROOT / ".github/workflows/nightly.yml").read_text()
    commands = re.findall(r"^\s*- run: make (\S+)", workflow, re.MULTILINE)
    assert commands == ["test-federation-simulation", "test-chaos"]
    for target in commands:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_hooks_are_the_linters_of_make_test() -> None:
    hooks = re.findall(r"^\s*entry: \.venv/bin/(.+)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    commands = re.findall(r"^\t\$\(BIN\)/((?:ruff|mypy)[^$\n]*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert hooks == [command.partition(" src ")[0] for command in commands]


def test_python_versions_are_the_same_everywhere() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.11,<3.14"' in text
    assert re.findall(r"Python :: (3\.\d+)", text) == ["3.11", "3.12", "3.13"]
