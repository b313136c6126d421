"""Trackers: what they are sent, how they go on after a resume, and that their faults never cost a run."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
from torch import nn

from cli_helpers import fedauc
from fedauc import Recipe, fit
from fedauc.experiments.callbacks.csv_log import CsvLog
from fedauc.experiments.parameters import flatten_parameters
from fedauc.transforms.clip import Clip
from small_federations import FEATURES, held_out, small_federation

TINY = (
    *("--data", "synthetic", "--data.clients", "6", "--data.rows-per-client", "30", "--cycles", "3"),
    *("--local-steps", "2", "--groups", "3", "--method", "cycp-fedavg"),
)


def read_records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def test_every_record_is_a_line_of_the_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, table = tmp_path / "run", tmp_path / "elsewhere" / "table.csv"
    words = ("--callbacks", "csv,jsonl", "--callbacks.csv.path", str(table), "--out", str(out))
    assert fedauc(capsys, "run", *TINY, *words).code == 0
    records = read_records(out)
    assert len(records) == 3
    assert [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()] == records
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [list(row) for row in rows] == [list(record) for record in records]
    assert [float(row["auc"]) for row in rows] == [record["auc"] for record in records]
    assert [int(row["bytes_up"]) for row in rows] == [record["bytes_up"] for record in records]


def test_trackers_of_a_private_run_are_not_told_how_many_clients_came(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Draws of clients amplify privacy only while nobody knows them; epsilon and metrics are sent."""
    private = ("--epsilon", "8", "--delta", "1e-3", "--participation", "cyclic-poisson", "--participation.rate", "0.5")
    out = tmp_path / "run"
    assert fedauc(capsys, "run", *TINY, *private, "--callbacks", "jsonl", "--out", str(out)).code == 0
    sent = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    hidden = {"visits", "absences", "floats_down", "floats_up", "bytes_down", "bytes_up"}
    for line, record in zip(sent, read_records(out), strict=True):
        assert set(record) - set(line) == hidden
        assert (line["epsilon"], line["auc"]) == (record["epsilon"], record["auc"])


@pytest.mark.parametrize("checkpoints_lost", [0, 1])
def test_the_file_of_a_resumed_run_is_that_of_one_without_interruption(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, checkpoints_lost: int
) -> None:
    """The run is resumed from its last checkpoint, with nothing left to train, or from its first one."""
    out = tmp_path / "run"
    assert fedauc(capsys, "run", *TINY, "--callbacks", "csv", "--out", str(out)).code == 0
    complete = (out / "log.csv").read_bytes()
    (out / "result.json").unlink()
    for checkpoint in sorted((out / "checkpoints").iterdir())[2 - checkpoints_lost :]:
        checkpoint.unlink()
    with (out / "log.csv").open("a") as file:
        file.write("written after the checkpoint\n")
    resumed = fedauc(capsys, "resume", str(out))
    assert resumed.code == 0
    assert (out / "log.csv").read_bytes() == complete


@pytest.mark.parametrize(
    ("path", "reason"), [("/proc/nowhere/log.csv", "No such file"), ("{taken}", "exists already; choose another file")]
)
def test_a_tracker_that_fails_is_a_warning_and_the_run_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, path: str, reason: str
) -> None:
    taken = tmp_path / "taken.csv"
    taken.write_text("precious")
    chosen = ("--callbacks", "csv", "--callbacks.csv.path", path.format(taken=taken))
    outcome = fedauc(capsys, "run", *TINY, *chosen, "--out", str(tmp_path / "run"))
    assert outcome.code == 0
    warning = " ".join(outcome.err.split())
    assert warning.count("the run goes on without the callback 'csv': ") == 1
    assert reason in warning
    assert len(read_records(tmp_path / "run")) == 3
    assert taken.read_text() == "precious"


def test_fit_takes_trackers_too(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    callback = CsvLog(path=str(path))
    model = nn.Linear(FEATURES, 1)
    fitted = fit(model, small_federation(), test=held_out(), callbacks=callback, cycles=2, local_steps=1)
    with path.open(newline="") as file:
        assert [float(row["auc"]) for row in csv.DictReader(file)] == [quality["auc"] for _, quality in fitted.history]


def test_a_tracker_without_its_package_is_refused_before_training(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if "site-packages" not in folder])
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    outcome = fedauc(capsys, "run", *TINY, "--callbacks", "mlflow", "--out", str(tmp_path / "run"))
    assert outcome.err == "error: callbacks lists 'mlflow', which needs a package: run pip install mlflow\n"
    assert not (tmp_path / "run").exists()


def test_parameters_are_the_fields_of_the_configuration() -> None:
    parameters = flatten_parameters({"recipe": Recipe.of("cycp-pairwise", groups=4, transforms=(Clip(norm=2.0),))})
    assert parameters["recipe.participation"] == "cyclic"
    assert parameters["recipe.participation.groups"] == 4
    assert parameters["recipe.algorithm.objective"] == "sigmoid"
    assert (parameters["recipe.transforms"], parameters["recipe.transforms.clip.norm"]) == ("clip", 2.0)
    assert parameters["recipe.patience"] is None
