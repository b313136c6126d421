"""`fedauc audit`: what it prints at 80 columns, its exit codes, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import fedauc
from fedauc.data.datasets.synthetic import Synthetic
from fedauc.experiments import auditing
from fedauc.experiments.config import Config
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.runner import Run
from fedauc.federation.server import AGREEMENT_FILE
from fedauc.transforms._client_noise import NoisedClientDP


@pytest.fixture(autouse=True)
def _narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def make_folder(path: Path, method: str, **settings: Any) -> str:
    recipe = Recipe.of(method, cycles=6, groups=4, local_steps=2, **settings)
    config = Config(recipe=recipe, data=Synthetic(clients=24, rows_per_client=40, features=39, positive_rate=0.25))
    return str(Run.create(config, path / "run").folder.path)


@pytest.fixture
def private(tmp_path: Path) -> str:
    return make_folder(tmp_path, "cycp-pairwise", pool="histogram", epsilon=8.0, delta=1e-3)


def test_a_private_run(capsys: pytest.CaptureFixture[str], private: str) -> None:
    done = fedauc(capsys, "audit", private, "--repeats", "2", "--canaries", "30")
    assert done.code == 0, done.err
    assert all(len(line) <= 80 for line in done.out.splitlines())
    text = " ".join(done.out.split())
    assert "epsilon 8.00 (delta 0.001)" in text
    assert "with 95 % confidence, estimate" in text
    assert "No sign of a privacy bug. The estimate is consistent with the proof" in text
    assert "2 repetitions of the training with 30 canaries each" in text
    auc = r"AUC [01]\.\d{3} \[[01]\.\d{3}, [01]\.\d{3}\]"
    raw, histogram = "in the raw score pool with", r"in the noised histogram pool \(24 bins\) with"
    assert re.search(f"a client's positive rows are recognised {raw} {auc}, {histogram} {auc}", text)
    assert "audit: 48 rounds" in done.err
    assert "done, round 48 of 48" in done.err


def test_json_is_what_the_folder_holds(capsys: pytest.CaptureFixture[str], private: str) -> None:
    done = fedauc(capsys, "audit", private, "--repeats", "1", "--seed", "3", "--json")
    printed = json.loads(done.out)
    assert printed == json.loads((Path(private) / "audit.json").read_text())
    assert printed["seed"] == 3
    assert printed["canaries"]["result"]["verdict"] == "consistent"
    assert printed["pools"]["classes"][0]["label"] == "positive"


def test_a_violated_run_ends_with_code_1(
    capsys: pytest.CaptureFixture[str], private: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NoisedClientDP, "client", lambda self, upload, state, key, announced=(): (upload, state))
    done = fedauc(capsys, "audit", private, "--repeats", "2")
    assert done.code == 1
    assert "VIOLATED: " in done.out
    assert "the clip norm allows" in " ".join(done.out.split())


def test_a_plain_run_with_raw_scores(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    done = fedauc(capsys, "audit", make_folder(tmp_path, "cycp-pairwise"))
    text = " ".join(done.out.split())
    assert done.code == 0
    assert "no epsilon: the run adds no noise" in text
    assert "The run shares the raw pool, which leaks" in text


def test_refusals(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plain = make_folder(tmp_path, "cycp-fedavg")
    federated, several = tmp_path / "federated", tmp_path / "several"
    for folder, name in ((federated, AGREEMENT_FILE), (several, "comparison.json")):
        folder.mkdir()
        (folder / name).write_text("{}")
    for refused, reason in (
        (tmp_path / "nothing", "is not a run folder"),
        (Path(plain), "shares no scores, and no client-dp protects its clients; train it with --epsilon"),
        (federated, "is the folder of a federated run, whose rows are at its sites"),
        (several, "holds several runs; audit one of their folders"),
    ):
        done = fedauc(capsys, "audit", str(refused))
        assert done.code == 2
        assert reason in done.err
        assert done.err.count("\n") == 1
    assert fedauc(capsys, "audit", plain, "--repeats", "0").code == 2


def test_an_interrupted_audit_says_how_to_go_on_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], private: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(auditing, "combine_statistics", interrupt)
    done = fedauc(capsys, "audit", private, "--repeats", "1")
    assert done.code == 130
    assert done.err.splitlines()[-1] == "interrupted; go on with: the same command"
    assert not (Path(private) / "audit.json").exists()


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    done = fedauc(capsys, "audit", "--help")
    assert done.code == 0
    assert "--canaries" in done.out
    assert "--repeats" in done.out
    assert "audit" in fedauc(capsys, "--help").out
