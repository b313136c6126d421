"""Trackers with their real packages: a run is paused, resumed and read back from the tool.

They run in an environment of their own, with `make test-trackers`.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedauc.experiments.callbacks import Callback
from fedauc.experiments.callbacks.mlflow import MLflow
from fedauc.experiments.callbacks.tensorboard import TensorBoard
from fedauc.experiments.callbacks.trackio import Trackio
from fedauc.experiments.callbacks.wandb import Wandb
from fedauc.experiments.config import Config
from fedauc.experiments.options import build_config
from fedauc.experiments.run_loop import Progress, RunPaused
from fedauc.experiments.runner import Run
from fedauc.testing.callback import check_callback

pytestmark = [
    pytest.mark.trackers,
    # The tools warn of each other and of themselves.
    pytest.mark.filterwarnings("ignore"),
]

OPTIONS = {
    "data": "synthetic",
    "data.clients": "6",
    "data.rows-per-client": "30",
    "cycles": "4",
    "local-steps": "2",
    "participation.groups": "3",
}


@pytest.fixture(autouse=True)
def stay_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tools write by default goes to the test's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("WANDB_MODE", raising=False)


def configure(callback: Callback) -> Config:
    return replace(build_config("cycp-fedavg", None, OPTIONS), callbacks=(callback,))


def pause_at(rounds: int) -> Callable[[Progress], None]:
    def observe(progress: Progress) -> None:
        if progress.done == rounds:
            raise RunPaused

    return observe


def train_with_a_pause(callback: Callback, out: Path) -> list[dict[str, Any]]:
    """A run of four cycles that is paused after its second evaluation and resumed; its records."""
    with pytest.raises(RunPaused):
        Run.create(configure(callback), out).train_to_end(pause_at(7))
    resumed = Run.resume(out)
    resumed.train_to_end()
    return resumed.folder.read_records()


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A tracking server on this machine, with a database and a folder of artifacts."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stores = ("--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", str(folder / "files"))
    address = ("--host", "127.0.0.1", "--port", str(port), "--workers", "1")
    command = [sys.executable, "-m", "mlflow", "server", *stores, *address]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process, folder / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text())


@pytest.mark.parametrize("store", ["server", "database"])
def test_mlflow_holds_the_resumed_run_once(tmp_path: Path, request: pytest.FixtureRequest, store: str) -> None:
    from mlflow import MlflowClient

    uri = request.getfixturevalue("mlflow_server") if store == "server" else f"sqlite:///{tmp_path}/runs.db"
    records = train_with_a_pause(MLflow(uri=uri, experiment="hospitals"), tmp_path / "run")
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("hospitals")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert (run.info.run_name, run.data.params["recipe.cycles"]) == ("run", "4")
    history = client.get_metric_history(run.info.run_id, "auc")
    assert [(point.step, point.value) for point in history] == [(line["round"], line["auc"]) for line in records]
    assert run.data.metrics["final/bytes_up"] == records[-1]["bytes_up"]
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"model.pt", "parameters.json"}
    model = Path(client.download_artifacts(run.info.run_id, "model.pt", str(tmp_path)))
    assert model.stat().st_size > 0


def test_a_tracking_server_that_does_not_answer_costs_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    Run.create(configure(MLflow(uri="http://127.0.0.1:1")), tmp_path / "run").train_to_end()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len([text for text in warnings if text.startswith("the run goes on without the callback 'mlflow': ")]) == 1


def test_tensorboard_draws_the_resumed_run_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = train_with_a_pause(TensorBoard(), tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    drawn = [(event.step, event.value) for event in events.Scalars("auc")]
    assert drawn == [(record["round"], pytest.approx(record["auc"], rel=1e-6)) for record in records]
    assert "final/auc" in events.Tags()["scalars"]
    assert "parameters/text_summary" in events.Tags()["tensors"]
    assert (tmp_path / "run" / "tensorboard" / "model.pt").is_file()


def train_in_two_processes(callback: str, out: Path) -> list[dict[str, Any]]:
    """A run that one process pauses and another one resumes, with a callback as Python writes it; its records."""
    program = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from experiments.test_tracking_tools import *
out = Path(sys.argv[2])
if sys.argv[3] == "new":
    Run.create(configure(eval(sys.argv[1])), out).train_to_end(pause_at(7))
else:
    Run.resume(out).train_to_end()
"""
    for stage in ("new", "resumed"):
        command = [sys.executable, "-c", program, callback, str(out), stage, *filter(None, sys.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        # Pausing ends the first process with an error.
        assert ("RunPaused" in done.stderr) == (stage == "new"), done.stderr
        assert "goes on without" not in done.stderr
    return [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]


def test_wandb_keeps_the_resumed_run_offline_under_one_identifier(tmp_path: Path) -> None:
    train_in_two_processes("Wandb(project='hospitals')", tmp_path / "run")
    folders = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    identifier = json.loads((tmp_path / "run" / "tracker-wandb.json").read_text())["id"]
    assert {folder.name.rpartition("-")[2] for folder in folders} == {identifier}
    # One folder for each of the two processes that worked on the run; `wandb sync` joins them.
    assert len(folders) == 2
    assert all(list(folder.glob("run-*.wandb")) for folder in folders)


def test_wandb_follows_the_mode_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    Run.create(configure(Wandb()), tmp_path / "run").train_to_end()
    assert not list(tmp_path.rglob("offline-run-*"))


TRACKIO_PROGRAM = """
import json
from trackio import Api
from trackio.sqlite_storage import SQLiteStorage
runs = [(run.name, run.config, run.id) for run in Api().runs("hospitals")]
print(json.dumps([[name, config, SQLiteStorage.get_logs("hospitals", name, run_id=id)] for name, config, id in runs]))
"""


def test_trackio_holds_the_resumed_run_once(tmp_path: Path) -> None:
    """The folder of its database is read when the package is imported, so that it is read in a new process."""
    records = train_in_two_processes("Trackio(project='hospitals')", tmp_path / "run")
    identifier = json.loads((tmp_path / "run" / "tracker-trackio.json").read_text())["id"]
    read = subprocess.run([sys.executable, "-c", TRACKIO_PROGRAM], capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    ((name, parameters, logs),) = json.loads(read.stdout.splitlines()[-1])
    assert name == identifier
    assert parameters["recipe.cycles"] == 4
    logged = [[log["step"], log["auc"]] for log in logs if "auc" in log]
    assert logged == [[record["round"], record["auc"]] for record in records]
    assert list((tmp_path / "trackio" / "artifacts").rglob("*"))


@pytest.mark.parametrize("tracker", [MLflow(), TensorBoard(), Wandb(), Trackio()], ids=lambda tracker: tracker.name)
def test_a_tracker_keeps_the_promises_of_callbacks(tracker: Callback, caplog: pytest.LogCaptureFixture) -> None:
    check_callback(tracker)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []
