"""Real servers and sites of NVFlare on loopback, with certificates: the simulator's bits, whoever is killed on the way.

Run with `make test-nvflare`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedauc.experiments.folder import RunFolder
from fedauc.federation.audit_log import read_entries, verify_log
from fedauc.federation.local_federation import list_descendants, write_demo_sites
from fedauc.federation.nvflare_federation import SERVER_NAME, LocalFlare, write_job
from fedauc.federation.server import summarize_run
from federation.transports import AGREEMENTS, SITES, read_trained_weights, simulate_weights

pytestmark = pytest.mark.nvflare

SECONDS = 240.0
"""What a job may take on a busy machine, of which most is starting five processes."""


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFlare]:
    """A server and four sites that have registered."""
    folder = tmp_path_factory.mktemp("nvflare")
    with LocalFlare(folder, SITES) as federation:
        write_demo_sites(folder / "sites", list(SITES))
        for name in (SERVER_NAME, *SITES):
            federation.start_participant(name)
        wait_until(lambda: has_registered(federation, list(SITES)))
        yield federation


def has_registered(trial: LocalFlare, names: list[str]) -> bool:
    logs = [(trial.folder / "logs" / f"{name}.log").read_text() for name in names]
    return all("Successfully registered client" in log for log in logs)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.1)


def submit_run(trial: LocalFlare, settings: dict[str, Any]) -> str:
    """Submit a job; a server that has just started, or is busy, may not answer an administrator at once."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            return trial.submit_run(settings)
        except ValueError:
            assert time.monotonic() < end
            time.sleep(1.0)


def count_rounds(run: Path) -> int:
    return len(RunFolder(run).read_lines("attendance.jsonl"))


def find_job_process(trial: LocalFlare, name: str) -> int:
    """The process of a site that computes, which the site's resident process has started for the job."""
    (job,) = (pid for pid in trial.process_ids(name) if "worker_process" in Path(f"/proc/{pid}/cmdline").read_text())
    return job


@pytest.mark.parametrize("title", AGREEMENTS)
def test_every_agreement_gives_the_bits_of_the_simulator(trial: LocalFlare, title: str) -> None:
    """The algorithms do not know the transport: `test_real.py` has the same on Flower."""
    agreement, run = AGREEMENTS[title], trial.folder / title.replace(" ", "-")
    job = submit_run(trial, {**agreement.write_settings(), "out": str(run)})
    assert trial.wait_for_end(job, SECONDS) == "FINISHED:COMPLETED"
    expected = simulate_weights(trial.folder, agreement.method, **agreement.settings)
    np.testing.assert_array_equal(read_trained_weights(run), expected)
    summary = summarize_run(run)
    assert summary["status"] == "done"
    assert {counts["absent"] for counts in summary["attendance"].values()} == {0}
    for name in SITES:
        state = trial.folder / "sites" / name / "state"
        assert not verify_log(state).problem
        messages = [entry for entry in read_entries(state) if entry["run"] == RunFolder(run).path.name or entry["run"]]
        assert {"register", "visit"} <= {entry["asked"] for entry in messages}


def test_a_killed_site_process_and_a_killed_server_leave_a_run_that_resumes_to_the_same_bits(trial: LocalFlare) -> None:
    """NVFlare ends the job of a killed process; the next job goes on from the last finished round."""
    run, settings = trial.folder / "killed", {"method": "cycp-minimax", "cycles": 20, "evaluate-every": 10}
    settings = {**settings, "deadline": 120.0, "out": str(run)}
    job = submit_run(trial, settings)
    wait_until(lambda: count_rounds(run) >= 6)
    os.kill(find_job_process(trial, "site-3"), signal.SIGKILL)
    assert trial.wait_for_end(job, SECONDS) == "FINISHED:EXECUTION_EXCEPTION"
    first = count_rounds(run)
    assert first < 60
    submit_run(trial, {**settings, "resume": True})
    wait_until(lambda: count_rounds(run) >= first + 6)
    trial.stop_process(SERVER_NAME, signal.SIGKILL)
    second = count_rounds(run)
    assert second < 60
    trial.start_participant(SERVER_NAME)
    job = submit_run(trial, {**settings, "resume": True})
    assert trial.wait_for_end(job, SECONDS) == "FINISHED:COMPLETED"
    assert [line["round"] for line in RunFolder(run).read_lines("attendance.jsonl")] == list(range(60))
    expected = simulate_weights(trial.folder, "cycp-minimax", cycles=20)
    np.testing.assert_array_equal(read_trained_weights(run), expected)


def test_a_site_with_wrong_labels_is_named_and_its_log_stays_with_it(trial: LocalFlare) -> None:
    """NVFlare streams a site's own logs to the server; ours, which quotes the labels, is a file of the site's owner."""
    labels = trial.folder / "sites" / "site-1" / "rows" / "y.npy"
    original = np.load(labels)
    np.save(labels, original.astype(np.int64) + 471_147_114_711)
    try:
        run = trial.folder / "labels"
        job = submit_run(trial, {"method": "cycp-fedavg", "cycles": 1, "out": str(run)})
        assert trial.wait_for_end(job, SECONDS) == "FINISHED:EXECUTION_EXCEPTION"
    finally:
        np.save(labels, original)
    reason = (trial.folder / "labels-failed.txt").read_text()
    assert reason.startswith("site 'site-1': ValueError; see the site's log")
    site_log = trial.folder / "sites" / "site-1" / "state" / "site.log"
    assert "4.71147e+11" in site_log.read_text()
    assert site_log.stat().st_mode & 0o077 == 0
    job_files = [
        path for path in trial.kits.rglob("*") if path.is_file() and job in str(path) and path.suffix != ".json"
    ]
    assert len(job_files) >= 5
    assert all(b"4.71147e+11" not in path.read_bytes() for path in (*job_files, trial.folder / "logs" / "site-1.log"))


def test_the_owner_policy_decides_and_a_site_that_has_not_allowed_fedauc_runs_nothing(trial: LocalFlare) -> None:
    """A policy that approves nothing refuses the run; a site without our classes in its list refuses the job."""
    local = trial.kits / "site-2" / "local"
    config, resources = (local / name for name in ("fedauc.toml", "resources.json"))
    texts = {path: path.read_text() for path in (config, resources)}
    policy = trial.folder / "policy.toml"
    policy.write_text('[methods]\nmethods = ["a-scaffold"]\n')
    settings = {"method": "cycp-fedavg", "cycles": 1}
    try:
        config.write_text(f'{texts[config]}policy = "{policy}"\n')
        job = submit_run(trial, {**settings, "out": str(trial.folder / "refused")})
        assert trial.wait_for_end(job, SECONDS) == "FINISHED:EXECUTION_EXCEPTION"
        reason = (trial.folder / "refused-failed.txt").read_text()
        assert reason.startswith("site 'site-2': the plan's method is 'cycp-fedavg'; this site allows a-scaffold")
        entry = read_entries(trial.folder / "sites" / "site-2" / "state")[-1]
        assert entry["sent"] == "refusal"
        config.write_text(texts[config])
        resources.write_text((local / "resources.json.default").read_text())
        before = len(read_entries(trial.folder / "sites" / "site-2" / "state"))
        job = submit_run(trial, {**settings, "out": str(trial.folder / "unlisted")})
        assert trial.wait_for_end(job, SECONDS) != "FINISHED:COMPLETED"
        assert not (trial.folder / "unlisted" / "result.json").exists()
        assert len(read_entries(trial.folder / "sites" / "site-2" / "state")) == before
    finally:
        for path, text in texts.items():
            path.write_text(text)


def test_a_site_takes_no_code_from_a_job(trial: LocalFlare) -> None:
    """NVFlare's own setting lets an administrator's job bring code, which could read all that a site holds."""
    marker, job = trial.folder / "code-has-run", trial.folder / "jobs" / "with-code"
    write_job(
        job, {"method": "cycp-fedavg", "out": str(trial.folder / "code"), "sites": str(trial.folder / "sites.toml")}
    )
    (job / "site" / "custom").mkdir()
    (job / "site" / "custom" / "brought.py").write_text(
        f"from pathlib import Path\nfrom fedauc.federation.nvflare import SiteExecutor\nPath({str(marker)!r}).touch()\n"
    )
    config = job / "site" / "config" / "config_fed_client.json"
    config.write_text(config.read_text().replace("fedauc.federation.nvflare.SiteExecutor", "brought.SiteExecutor"))
    job_id = str(trial.run_job_command("submit", "-j", str(job))["job_id"])
    assert trial.wait_for_end(job_id, SECONDS) != "FINISHED:COMPLETED"
    assert not marker.exists()


def test_processes_end_with_their_parents(trial: LocalFlare) -> None:
    """No process of a finished job stays behind."""
    wait_until(lambda: all(len(trial.process_ids(name)) == 1 for name in (SERVER_NAME, *SITES)))
    assert list_descendants(os.getpid())
