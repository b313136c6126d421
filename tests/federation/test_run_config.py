"""A server starts and resumes runs as a flat run configuration says, and says what it does otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedauc.federation.in_process import InProcessGrid
from fedauc.federation.run_config import serve_run
from fedauc.federation.server import read_failure
from federation.hospital_tables import HOSPITALS, SCHEMA, make_controlled_sites


def write_config(folder: Path, **settings: Any) -> dict[str, Any]:
    """The run configuration of the hospitals' federation."""
    (folder / "sites.toml").write_text("".join(f'[{name}]\ngroup = "{group}"\n' for name, group in HOSPITALS.items()))
    (folder / "schema.toml").write_text(SCHEMA.to_toml())
    paths = {"out": str(folder / "run"), "sites": str(folder / "sites.toml"), "schema": str(folder / "schema.toml")}
    return {"method": "cycp-minimax", "cycles": 1, "poll-interval": 0.001, **paths, **settings}


def test_a_resumed_run_keeps_its_settings_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid = InProcessGrid(make_controlled_sites(tmp_path / "sites"))
    serve_run(grid, write_config(tmp_path))
    assert "keeps the settings" not in caplog.text
    serve_run(grid, write_config(tmp_path, resume=True))
    assert "keeps the settings" not in caplog.text
    changed = write_config(tmp_path, resume=True, cycles=5, deadline=60.0, model="mlp", method="cycp-fedavg")
    serve_run(grid, changed)
    assert "the run keeps the settings that it began with: " in caplog.text
    for difference in ("cycles is 1, not 5", "deadline is 600.0, not 60.0", "method is cycp-minimax, not cycp-fedavg"):
        assert difference in caplog.text


def test_a_run_that_does_not_exist_cannot_be_resumed(tmp_path: Path) -> None:
    grid = InProcessGrid(make_controlled_sites(tmp_path / "sites"))
    with pytest.raises(ValueError, match=r"run is no federated run: it has no federation\.json; give the out"):
        serve_run(grid, write_config(tmp_path, resume=True))


def test_the_reason_of_the_last_failure_is_kept(tmp_path: Path) -> None:
    """Settings that cannot be used are a failure as well as sites that do not answer."""
    grid = InProcessGrid(make_controlled_sites(tmp_path / "sites", '[runs]\napproval = "required"'))
    with pytest.raises(Exception, match="awaits approval"):
        serve_run(grid, write_config(tmp_path))
    assert "awaits approval" in read_failure(tmp_path / "run")
    with pytest.raises(ValueError, match="cycles is 0"):
        serve_run(grid, write_config(tmp_path, cycles=0))
    assert read_failure(tmp_path / "run").startswith("cycles is 0")
