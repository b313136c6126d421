"""One small comparison that the tests of reports share."""

from __future__ import annotations

from pathlib import Path

import pytest

from report_runs_helpers import train_comparison


@pytest.fixture(scope="session")
def comparison_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_comparison(tmp_path_factory.mktemp("reports") / "comparison")
