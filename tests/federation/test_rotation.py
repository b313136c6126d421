"""The server's certificate, also of another authority, and a site's key are replaced in the middle of a run.

Real processes on loopback; run with `make test-federation`. The run is stopped and resumed, and its model has the bits
of a run that nobody disturbed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedauc.experiments.folder import RunFolder
from fedauc.federation.app_folder import create_key_pair
from fedauc.federation.certificate_renewal import list_certificates
from fedauc.federation.local_federation import SUPERLINK_NAME, LocalFederation
from fedauc.federation.run_outcome import find_run_id
from fedauc.federation.server import summarize_run
from federation.test_real import create_trial, wait_for_end, wait_until
from federation.transports import SITES, read_trained_weights, simulate_weights

pytestmark = pytest.mark.flower

SETTINGS = 'cycles=3 deadline=900.0 method="cycp-minimax" evaluation="none" options="algorithm.prox=0.1"'
ROUNDS = 9
"""Three groups in each of three cycles."""


def run_fedauc(trial: LocalFederation, *words: str) -> subprocess.CompletedProcess[str]:
    """A command as its operator types it, with Flower's settings of the trial."""
    return subprocess.run(
        [sys.executable, "-m", "fedauc", "federation", *words],
        cwd=trial.folder / "logs",
        env={**os.environ, "FLWR_HOME": str(trial.folder / "flower")},
        capture_output=True,
        text=True,
        check=False,
    )


def start_and_wait(trial: LocalFederation, name: str, key: str = "") -> None:
    """Start a site, if need be with another key, and wait until the server has accepted it."""
    log = trial.folder / "logs" / f"{key or name}.log"
    before = log.read_text().count("connected to") if log.exists() else 0
    if key:
        home = trial.folder / "sites" / name
        trial.start_supernode(key, {"data": str(home / "rows"), "state": str(home / "state")})
    else:
        trial.start_site(name)
    end = time.monotonic() + 60
    while log.read_text().count("connected to") == before:
        assert time.monotonic() < end, log.read_text()[-1000:]
        assert trial.is_running(key or name), log.read_text()[-1000:]
        time.sleep(0.1)


def count_rounds(folder: Path) -> int:
    return len(RunFolder(folder / "run").read_lines("attendance.jsonl"))


def train_undisturbed(folder: Path) -> np.ndarray:
    """The weights of the same run without any change."""
    with create_trial(folder) as trial:
        trial.start_superlink()
        for name in SITES:
            trial.register_site(name)
            trial.start_site(name)
        trial.start_run(SETTINGS)
        wait_for_end(trial)
    return read_trained_weights(folder / "run")


def test_certificate_authority_and_key_are_replaced_in_mid_run_without_changing_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    with create_trial(folder) as trial:
        trial.start_superlink()
        for name in SITES:
            trial.register_site(name)
            trial.start_site(name)
        trial.start_run(SETTINGS)
        wait_until(trial, lambda: count_rounds(folder) >= 3)
        # The only site of the last group leaves, so that the run waits for it in a later cycle.
        trial.stop_process("site-2")
        wait_until(trial, lambda: count_rounds(folder) >= 5)
        assert count_rounds(folder) < ROUNDS

        # A run that goes on knows the old key, so the command refuses and says what to do.
        create_key_pair(folder / "keys" / "site-1-new")
        new_key = str(folder / "keys" / "site-1-new.pub")
        refused = run_fedauc(trial, "replace-key", str(folder), "site-1", new_key, SUPERLINK_NAME)
        run_id = find_run_id((folder / "logs" / "run.log").read_text())
        assert refused.returncode == 2
        assert f"stop it with `flwr stop {run_id} {SUPERLINK_NAME}`" in refused.stderr

        trial.run_flwr("stop", run_id, SUPERLINK_NAME)
        wait_for_end(trial)
        # Sites trust both authorities before the server changes.
        assert run_fedauc(trial, "certificates", str(folder), "--prepare").returncode == 0
        assert len(list_certificates(folder / "certificates" / "ca.pem")) == 2
        assert not (folder / "run" / "result.json").exists()
        replaced = run_fedauc(trial, "replace-key", str(folder), "site-1", new_key, SUPERLINK_NAME)
        assert replaced.returncode == 0, replaced.stderr
        assert "unregistered node" in replaced.stdout
        # The command can be repeated, as after a crash in the middle of it.
        assert run_fedauc(trial, "replace-key", str(folder), "site-1", new_key, SUPERLINK_NAME).returncode == 0
        for name in SITES.keys() - {"site-2"}:
            trial.stop_process(name)

        assert run_fedauc(trial, "certificates", str(folder), "--switch").returncode == 0
        trial.stop_process("superlink")
        trial.start_superlink()
        for name in SITES:
            start_and_wait(trial, name, "site-1-new" if name == "site-1" else "")
        # The old key opens nothing any more.
        trial.start_site("site-1")
        trial.start_run(f"{SETTINGS} resume=true")
        wait_for_end(trial)
        assert trial.exit_code("site-1") not in (None, 0)

        # In the end the new authority is trusted alone.
        assert run_fedauc(trial, "certificates", str(folder), "--finish").returncode == 0
        (authority,) = list_certificates(folder / "certificates" / "ca.pem")
        assert authority.days_left(authority.begin) >= 364
        trial.stop_process("site-0")
        start_and_wait(trial, "site-0")
    summary = summarize_run(folder / "run")
    assert summary["status"] == "done"
    assert [line["round"] for line in RunFolder(folder / "run").read_lines("attendance.jsonl")] == list(range(ROUNDS))
    assert {name: counts["absent"] for name, counts in summary["attendance"].items()} == dict.fromkeys(SITES, 0)
    np.testing.assert_array_equal(read_trained_weights(folder / "run"), train_undisturbed(tmp_path / "undisturbed"))
    expected = simulate_weights(folder, "cycp-minimax", cycles=3, prox=0.1)
    np.testing.assert_allclose(read_trained_weights(folder / "run"), expected, rtol=0, atol=1e-6)
