"""The audit of pinned packages never reports success for packages that nobody has looked at."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "packaging" / "audit.py"


def load_audit() -> Any:
    spec = importlib.util.spec_from_file_location("audit", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CLEAN = {"name": "numpy", "version": "2.0", "vulns": []}
SKIPPED = {"name": "torch", "skip_reason": "Dependency not found"}
VULNERABLE = {"name": "jinja2", "version": "3.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3.1"]}]}


@pytest.mark.parametrize(
    ("packages", "code", "said"),
    [
        ([CLEAN], 0, "pins: 1 of 1 packages audited, 0 vulnerable"),
        ([CLEAN, SKIPPED], 3, "not audited, as the service has no answer for them: torch"),
        ([CLEAN, SKIPPED, VULNERABLE], 1, "jinja2 3.0: PYSEC-1, fixed in 3.1"),
    ],
)
def test_only_audited_packages_count_as_audited(
    capsys: pytest.CaptureFixture[str], packages: list[dict[str, Any]], code: int, said: str
) -> None:
    assert load_audit().report_findings("pins", packages) == code
    captured = capsys.readouterr()
    assert said in captured.out + captured.err
