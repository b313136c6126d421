"""Metrics and callbacks on the command line, also those of a module outside the library."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_helpers import fedauc

TINY = (
    *("--data", "synthetic", "--data.clients", "6", "--data.rows-per-client", "30", "--groups", "3"),
    *("--cycles", "3", "--local-steps", "2"),
)
MANY = "pauc@0.2,auc,ap,tpauc@0.3:0.4,recall@0.1"

PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar
from fedauc.experiments.callbacks import Callback
from fedauc.metrics.metric import Measurement, Metric

@dataclass(frozen=True)
class Median(Metric):
    \"\"\"The share of positives above the median score.\"\"\"
    name: ClassVar[str] = "above-median"
    def measure(self, labels, scores):
        return Measurement(float((scores[labels == 1] > sorted(scores)[len(scores) // 2]).mean()))

@dataclass(frozen=True)
class Ticker(Callback):
    \"\"\"Writes a line per round.\"\"\"
    name: ClassVar[str] = "ticker"
    mark: str = "tick"
    def on_round_end(self, run, state):
        with (run.folder / "ticks.txt").open("a") as file:
            file.write(f"{self.mark} {run.rounds_done}\\n")
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module with a metric and a callback, named in the environment."""
    (tmp_path / "my_members.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FEDAUC_PLUGINS", "my_members")
    yield
    del sys.modules["my_members"]


def test_metrics_are_columns_of_records_and_tables(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "run"
    ran = fedauc(capsys, "run", *TINY, "--metrics", MANY, "--out", str(out))
    assert ran.code == 0, ran.err
    record = json.loads((out / "records.jsonl").read_text().splitlines()[-1])
    values = [
        "pauc@0.2",
        "auc",
        "low",
        "high",
        "average_precision",
        "tpauc@0.3:0.4",
        "recall@0.1",
        "validation_pauc@0.2",
    ]
    assert [column for column in record if column in values] == values
    assert "validation_auc" not in record
    assert f"pauc@0.2 {record['pauc@0.2']:.4f}, AUC {record['auc']:.4f} [" in ran.out
    shown_best = "(the highest validation pauc@0.2, not saved: --keep best would save it)"
    assert shown_best in " ".join(ran.out.split())
    shown = json.loads(fedauc(capsys, "show", str(out), "--json").out)
    assert shown["best_by"] == "validation_pauc@0.2"
    assert shown["final"]["tpauc@0.3:0.4"] == record["tpauc@0.3:0.4"]


def test_a_comparison_of_many_metrics_fits_80_columns(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "both"
    ran = fedauc(capsys, "compare", *TINY, "--methods", "cycp-fedavg,fedavg", "--metrics", MANY, "--out", str(out))
    assert ran.code == 0, ran.err
    assert max(map(len, ran.out.splitlines()[:3])) <= 80
    assert "…" not in ran.out
    assert "Omitted, for lack of room: tpauc@0.3:0.4, recall@0.1" in " ".join(ran.out.split())
    header = (out / "table.md").read_text().splitlines()[0]
    assert header == "| method | pauc@0.2 | AUC | AP | tpauc@0.3:0.4 | recall@0.1 | rounds | up | down | sec | p |"


def test_a_sweep_ranks_by_its_first_metric(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "sweep"
    vary = ("--method", "cycp-fedavg", "--vary", "lr=0.1,1,3")
    ran = fedauc(capsys, "sweep", *TINY, *vary, "--metrics", "recall@0.2,auc", "--out", str(out))
    assert ran.code == 0, ran.err
    assert "Sorted by validation recall@0.2" in ran.out
    runs = json.loads(fedauc(capsys, "show", str(out), "--json").out)
    ranked = sorted(runs, key=lambda run: -run["best"]["validation_recall@0.2"])
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in (out / "table.md").read_text().splitlines()[:5]]
    assert rows[0] == ["setting", "runs", "validation", "final", "best", "AUC"]
    assert [row[0].replace(" ", "/") for row in rows[2:]] == [run["setting"] for run in ranked]
    assert [row[5] for row in rows[2:]] == [f"{run['final']['auc']:.3f}".removeprefix("0") for run in ranked]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("run", "--metrics", "auc,bogus"),
            "unknown metric 'bogus': known: ap, auc, class-auc, ndcg, ovr-auc, pauc, precision, recall, tpauc",
        ),
        (("run", "--metrics", "AUC"), "unknown metric 'AUC': did you mean 'auc'? known: ap, auc"),
        (("run", "--metrics", "auc@1"), "metric 'auc@1' has 1 argument; auc takes none: write auc"),
        (
            ("run", "--ema-decay", "0.5"),
            "--ema-decay is 0.5, but stage_output is 'last', which ignores it; use --stage-",
        ),
        (
            ("run", "--evaluated-model", "average"),
            "--evaluated-model is 'average', but stage_output is 'last', which has no average; use --stage-output "
            "cycle_mean, round_mean or ema",
        ),
        (("run", "--keep", "best", "--callbacks", "best-model"), "--keep is 'best', and callbacks lists 'best-model'"),
        (
            ("sweep", "--transforms", "clip", "--vary", "transforms.clip.norm=0.1,-1"),
            "--transforms.clip.norm is -1.0; it must be",
        ),
        (
            ("run", "--objective.margin", "2"),
            "--objective.margin is not a parameter of the objective 'sigmoid', which has: --score, --objective.scale",
        ),
        (("run", "--metrics", ""), "metrics is empty; name at least 1, such as auc,ap"),
        (("sweep", "--vary", "metrics=auc,ap"), "all runs of a sweep are compared by the same metrics; use --metrics"),
        (("run", "--callbacks", "bogus"), "unknown callback 'bogus'"),
        (("run", "--patience", "0"), "patience is 0; it must be a whole number of at least 1"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    command, *options = words
    told = fedauc(capsys, command, *TINY, *options, "--out", str(tmp_path / "run"))
    assert told.code == 2
    assert message in told.err
    assert told.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_early_stopping_and_the_best_model_are_options_and_callbacks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chosen = ("--method", "cycp-fedavg", "--lr", "3", "--cycles", "9", "--seed", "1")
    data = TINY[: TINY.index("--cycles")]
    short = ("--patience", "1", "--keep", "best")
    long = ("--callbacks", "best-model,early-stopping", "--callbacks.early-stopping.patience", "1")
    results = []
    for name, options in (("short", short), ("long", long)):
        ran = fedauc(capsys, "run", *data, *chosen, *options, "--out", str(tmp_path / name))
        assert ran.code == 0, ran.err
        assert "done, stopped early: validation_auc has not risen above" in " ".join(ran.out.split())
        results.append((tmp_path / name / "result.json").read_bytes())
    assert results[0] == results[1]
    assert "kept_round" in json.loads(results[0])


@pytest.mark.usefixtures("plugin")
def test_a_metric_and_a_callback_from_outside_work_everywhere(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = fedauc(capsys, "list", "metrics").out
    assert "above-median" in listed
    assert "my_members" in listed
    assert "ticker" in fedauc(capsys, "list", "callbacks").out
    out = tmp_path / "sweep"
    members = ("--metrics", "above-median,auc", "--callbacks", "ticker", "--callbacks.ticker.mark", "tock")
    vary = ("--method", "cycp-fedavg", "--vary", "lr=0.1,1")
    ran = fedauc(capsys, "sweep", *TINY, *vary, *members, "--out", str(out))
    assert ran.code == 0, ran.err
    assert "Sorted by validation above-median" in " ".join(ran.out.split())
    folder = out / "cycp-fedavg" / "learning-rate=0.1" / "seed-0"
    assert (folder / "ticks.txt").read_text().splitlines() == [f"tock {round}" for round in range(1, 10)]
    record = json.loads((folder / "records.jsonl").read_text().splitlines()[-1])
    assert {"above-median", "validation_above-median"} <= set(record)
    assert json.loads((folder / "config.json").read_text())["plugins"] == {"my_members": None}
    expected = (folder / "records.jsonl").read_bytes()
    for name in ("result.json", "records.jsonl"):
        (folder / name).unlink()
    first, last = sorted((folder / "checkpoints").iterdir())
    last.unlink()
    assert first.name == "round-00000000.pt"
    assert fedauc(capsys, "resume", str(folder)).code == 0
    assert (folder / "records.jsonl").read_bytes() == expected
