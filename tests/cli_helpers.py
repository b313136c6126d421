"""Run the command line inside the test process, as a user's shell would see it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from fedauc.cli import start
from paper.__main__ import main as start_paper


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def fedauc(capsys: pytest.CaptureFixture[str], *arguments: str) -> Outcome:
    """Exit code and output of `fedauc ARGUMENTS`."""
    return _run(start, capsys, *arguments)


def paper_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> Outcome:
    """Exit code and output of `python -m paper ARGUMENTS`."""
    return _run(start_paper, capsys, *arguments)


def _run(start: Callable[[], None], capsys: pytest.CaptureFixture[str], *arguments: str) -> Outcome:
    before = sys.argv
    sys.argv = ["fedauc", *map(str, arguments)]
    capsys.readouterr()
    try:
        start()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = before
    captured = capsys.readouterr()
    return Outcome(code, captured.out, captured.err)
