"""From a saved model to scored files, another threshold and exported formats, as a user types it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedauc as library
from cli_helpers import fedauc
from fedauc.metrics.delong import delong_interval
from fedauc.scoring import table_files
from fedauc.scoring.calibration import measure_brier_score
from small_scorers import draw_table, make_small_scorer

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_small_scorer().save(tmp_path / "model")
    (tmp_path / "model" / "MODEL_CARD.md").write_text("# Card\n\n## Operating points\n\nold\n\n## Limits\n\nnone\n")
    return tmp_path / "model"


def draw_frame(rows: int = 40) -> pd.DataFrame:
    """New rows with columns in another order, an identifier, a label, and a column that the model does not know."""
    frame = pd.DataFrame(draw_table(rows, seed=4))
    frame["claim"] = [f"c-{number:03}" for number in range(rows)]
    frame["fraud"] = np.where(np.arange(rows) % 4 == 0, "yes", "no")
    frame["remark"] = 'text, with "quotes"'
    return frame[list(frame.columns[::-1])]


def read_csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def write_frame(frame: pd.DataFrame, file: Path) -> None:
    writers: dict[str, Any] = {
        ".csv": lambda: frame.to_csv(file, index=False),
        ".tsv": lambda: frame.to_csv(file, index=False, sep="\t"),
        ".parquet": lambda: frame.to_parquet(file),
        ".feather": lambda: frame.to_feather(file),
        ".jsonl": lambda: frame.to_json(file, orient="records", lines=True),
    }
    writers[file.suffix]()


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".feather", ".jsonl"])
def test_predict_scores_a_file(capsys: Capture, folder: Path, tmp_path: Path, suffix: str) -> None:
    frame, scorer = draw_frame(), library.load(folder)
    write_frame(frame, tmp_path / f"new{suffix}")
    done = fedauc(capsys, "predict", str(folder), str(tmp_path / f"new{suffix}"))
    assert (done.code, done.err) == (0, "")
    rows, expected = read_csv(done.out), scorer.score_rows(frame)
    assert list(rows[0]) == ["row", "score", "probability", "decision"]
    assert [int(row["row"]) for row in rows] == list(range(40))
    np.testing.assert_allclose([float(row["score"]) for row in rows], expected.scores, atol=1e-6)
    np.testing.assert_allclose([float(row["probability"]) for row in rows], expected.probabilities, atol=1e-6)
    assert [row["decision"] for row in rows] == scorer.predict(frame).tolist()


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_predict_writes_the_format_of_the_suffix_with_identifiers(
    capsys: Capture, folder: Path, tmp_path: Path, suffix: str
) -> None:
    frame = draw_frame()
    frame.to_csv(tmp_path / "new.csv", index=False)
    out = tmp_path / f"scores{suffix}"
    done = fedauc(capsys, "predict", str(folder), str(tmp_path / "new.csv"), "--out", str(out), "--id", "claim")
    assert (done.code, done.out, done.err) == (0, f"{out}: 40 rows, 1 of them with the decision 'yes'\n", "")
    readers: dict[str, Any] = {".csv": pd.read_csv, ".parquet": pd.read_parquet, ".jsonl": _read_json_lines}
    written = readers[suffix](out)
    assert list(written.columns) == ["claim", "score", "probability", "decision"]
    assert written["claim"].tolist() == frame["claim"].tolist()
    np.testing.assert_allclose(written["score"], library.load(folder).scores(frame), atol=1e-6)


def _read_json_lines(file: Path) -> pd.DataFrame:
    return pd.DataFrame([json.loads(line) for line in file.read_text().splitlines()])


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_predict_reads_large_files_in_blocks_with_the_same_result(
    capsys: Capture, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    write_frame(draw_frame(), tmp_path / f"new{suffix}")
    words = ("predict", str(folder), str(tmp_path / f"new{suffix}"), "--out")
    assert fedauc(capsys, *words, str(tmp_path / "whole.parquet")).code == 0
    monkeypatch.setattr(table_files, "BLOCK", 7)
    assert fedauc(capsys, *words, str(tmp_path / "blocks.parquet")).code == 0
    whole, blocks = (pd.read_parquet(tmp_path / f"{name}.parquet") for name in ("whole", "blocks"))
    pd.testing.assert_frame_equal(whole, blocks, atol=1e-6)


def test_an_error_names_the_row_of_the_file_also_beyond_the_first_block(
    capsys: Capture, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_files, "BLOCK", 7)
    frame = draw_frame().astype({"age": object})
    frame.loc[16, "age"] = "unknown"
    frame.to_csv(tmp_path / "new.csv", index=False)
    done = fedauc(capsys, "predict", str(folder), str(tmp_path / "new.csv"), "--out", str(tmp_path / "scores.csv"))
    assert done.code == 2
    assert "column 'age' holds 'unknown' at row 16 (counted from 0)" in done.err
    assert not (tmp_path / "scores.csv").exists()


def test_categories_that_look_like_numbers_are_read_as_the_encoder_knows_them(folder: Path, tmp_path: Path) -> None:
    scorer = library.load(folder)
    (tmp_path / "new.csv").write_text("age;state;day;flag\n40;CA;1970-03-01;True\n41;;?;FALSE\n42; NY;;\n")
    (table,) = table_files.iterate_tables(tmp_path / "new.csv", scorer)
    expected = {
        "age": [40.0, 41.0, 42.0],
        "state": ["CA", None, "NY"],
        "day": ["1970-03-01", None, None],
        "flag": [True, False, None],
    }
    np.testing.assert_array_equal(scorer.scores(table), scorer.scores(expected))


def test_predict_says_that_a_file_was_trained_on(capsys: Capture, folder: Path, tmp_path: Path) -> None:
    """Labels of the table of the run measure too high an AUC; a copy of it is not recognised."""
    for name in ("table.csv", "new.csv"):
        draw_frame().to_csv(tmp_path / name, index=False)
    (folder / "config.json").write_text(json.dumps({"data": {"name": "table", "path": str(tmp_path / "table.csv")}}))
    for name, is_said in (("table.csv", True), ("new.csv", False)):
        words = ("predict", str(folder), str(tmp_path / name), "--label", "fraud")
        done = fedauc(capsys, *words, "--out", str(tmp_path / "scores.csv"))
        assert done.code == 0, done.err
        said = " ".join(done.err.split())
        assert ("is the table that the model was trained on, so that its AUC is too high" in said) == is_said


def test_predict_measures_labels_that_are_asked_for(capsys: Capture, folder: Path, tmp_path: Path) -> None:
    frame, scorer = draw_frame(), library.load(folder)
    frame.loc[3, "fraud"] = None
    frame.to_csv(tmp_path / "new.csv", index=False)
    words = ("predict", str(folder), str(tmp_path / "new.csv"), "--label", "fraud")
    done = fedauc(capsys, *words, "--out", str(tmp_path / "scores.csv"))
    assert done.code == 0, done.err
    known = frame["fraud"].notna().to_numpy()
    interval = delong_interval((frame["fraud"] == "yes").to_numpy()[known], scorer.scores(frame)[known])
    assert "1 rows without a label are left out" in done.out
    assert f"{interval.estimate:.4f} [{interval.low:.4f}, {interval.high:.4f}]" in done.out
    assert "39, 10 of them yes" in done.out
    # Without --out the scores are on the standard output, and the metrics beside them.
    assert "AUC" in fedauc(capsys, *words).err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["new.csv", "--id", "claims"], "did you mean 'claim'"),
        (["new.csv", "--label", "remark"], "is neither 'no' nor 'yes'"),
        (["new.csv", "--out", "scores.xlsx"], "it must end in .csv, .parquet, .jsonl, .ndjson"),
        (["new.csv", "--out", "nowhere/scores.csv"], "there is no folder 'nowhere'; make it first"),
        (["old.csv"], "there is no such file"),
        (["short.csv"], "state"),
        (["text.csv"], "column 'age' holds 'old'"),
    ],
)
def test_predict_refuses_in_one_line_and_writes_nothing(
    capsys: Capture, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    draw_frame().to_csv("new.csv", index=False)
    draw_frame().drop(columns="state").to_csv("short.csv", index=False)
    draw_frame().assign(age="old").to_csv("text.csv", index=False)
    before = set(tmp_path.iterdir())
    done = fedauc(capsys, "predict", "model", *words, *([] if "--out" in words else ["--out", "scores.csv"]))
    assert done.code == 2
    assert message in done.err
    assert len(done.err.splitlines()) == 1
    assert set(tmp_path.iterdir()) == before


def test_predict_notices_columns_that_do_not_look_like_those_of_training(
    capsys: Capture, folder: Path, tmp_path: Path
) -> None:
    """Half of the rows or more: a feed that is broken, not a few odd rows."""
    frame = draw_frame().assign(age=1e9, state="Mars", day=None)
    frame.to_csv(tmp_path / "new.csv", index=False)
    done = fedauc(capsys, "predict", str(folder), str(tmp_path / "new.csv"), "--out", str(tmp_path / "scores.csv"))
    text = " ".join(done.err.split())
    assert done.code == 0
    where = "in 40 of 40 rows; check where they come from"
    assert f"column 'age' is more than 100 standard deviations from the training mean {where}" in text
    assert f"column 'state' is a category that training did not know {where}" in text
    assert f"column 'day' is missing {where}" in text
    assert "'flag'" not in text


def test_predict_without_both_classes_writes_scores_and_says_that_there_is_no_auc(
    capsys: Capture, folder: Path, tmp_path: Path
) -> None:
    draw_frame().assign(fraud="no").to_csv(tmp_path / "new.csv", index=False)
    words = ["predict", str(folder), str(tmp_path / "new.csv"), "--out", str(tmp_path / "scores.csv")]
    done = fedauc(capsys, *words, "--label", "fraud")
    assert done.code == 0
    assert "no AUC: all 40 labels are of one class" in done.out
    assert len(read_csv((tmp_path / "scores.csv").read_text())) == 40


def test_a_header_without_rows_gives_a_header_without_rows(capsys: Capture, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("age,state,day,flag\n")
    done = fedauc(capsys, "predict", str(folder), str(tmp_path / "new.csv"))
    assert (done.code, done.out) == (0, "row,score,probability,decision\n")


def test_a_model_of_arrays_scores_an_npz_file(capsys: Capture, tmp_path: Path) -> None:
    run = tmp_path / "run"
    tiny = ("--data", "synthetic", "--data.clients", "4", "--data.rows-per-client", "30", "--cycles", "1")
    assert fedauc(capsys, "run", *tiny, "--local-steps", "1", "--out", str(run)).code == 0
    rows = np.random.default_rng(0).normal(size=(5, 10)).astype(np.float32)
    np.savez(tmp_path / "new.npz", x=rows)
    done = fedauc(capsys, "predict", str(run), str(tmp_path / "new.npz"))
    scores = [float(row["score"]) for row in read_csv(done.out)]
    np.testing.assert_allclose(scores, library.load(run).scores(rows))
    refused = fedauc(capsys, "predict", str(run), str(tmp_path / "new.npz"), "--label", "y")
    assert "the model takes arrays" in refused.err


RULES = {
    "fpr 0.05": ("--fpr", "0.05"),
    "recall 0.8": ("--recall", "0.8"),
    "cost-fn 20, cost-fp 1": ("--cost-fn", "20", "--cost-fp", "1"),
    "alerts-per-day 20, rows-per-day 500": ("--alerts-per-day", "20", "--rows-per-day", "500"),
}


@pytest.mark.parametrize("rule", RULES)
def test_threshold_stores_the_chosen_operating_point(
    capsys: Capture, folder: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    before = library.load(folder).operating_point
    shown = fedauc(capsys, "threshold", str(folder), *RULES[rule], "--dry-run")
    assert shown.code == 0, shown.err
    assert rule in shown.out
    assert library.load(folder).operating_point == before
    assert fedauc(capsys, "threshold", str(folder), *RULES[rule]).code == 0
    stored = library.load(folder).operating_point
    assert stored.rule == rule
    assert f"{stored.threshold:.5g}" in shown.out
    card = (folder / "MODEL_CARD.md").read_text()
    assert f"rule: {rule}" in card
    assert card.endswith("## Limits\n\nnone\n")


def test_the_table_of_thresholds_is_cut_nowhere_in_80_columns(
    capsys: Capture, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rule = ("--alerts-per-day", "600", "--rows-per-day", "5000")
    lines = fedauc(capsys, "threshold", str(folder), *rule, "--dry-run").out.splitlines()
    assert max(map(len, lines)) <= 80
    intervals = [word for line in lines for word in line.split() if word[:1] == "(" and word[1].isdigit()]
    # One threshold has no alerts, and so no precision.
    assert len(intervals) == 4 * 9 - 1
    assert all(word.endswith(")") for word in intervals)


def test_threshold_without_a_rule_only_shows_the_table(capsys: Capture, folder: Path) -> None:
    before = (folder / "scorer.json").read_bytes()
    shown = fedauc(capsys, "threshold", str(folder))
    assert shown.code == 0
    assert "fpr 0.01" in shown.out
    assert (folder / "scorer.json").read_bytes() == before


def test_calibrate_changes_the_probabilities_and_nothing_else(capsys: Capture, folder: Path) -> None:
    before = library.load(folder)
    done = fedauc(capsys, "calibrate", str(folder), "--by", "isotonic")
    assert done.code == 0, done.err
    after = library.load(folder)
    assert (after.calibration.name, after.operating_point) == ("isotonic", before.operating_point)
    rows = before.require_reference()
    for scorer in (before, after):
        brier = measure_brier_score(rows.labels, scorer.calibration.probabilities(rows.scores))
        assert f"{brier:.5f}" in done.out
    refused = fedauc(capsys, "calibrate", str(folder), "--by", "spline")
    assert (refused.code, "unknown calibration 'spline'" in refused.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fpr", "0.1", "--recall", "0.9"], "several rules are given; choose one"),
        (["--cost-fn", "3"], "--cost-fp is missing; --cost-fn and --cost-fp go together"),
        (["--rows-per-day", "3"], "--alerts-per-day is missing"),
        (["--fpr", "2"], "error: --fpr is 2.0; it must be above 0 and at most 1"),
        (["--recall", "80"], "error: --recall is 80.0; it must be above 0 and at most 1"),
        (["--cost-fn", "-1", "--cost-fp", "1"], "error: --cost-fn is -1.0; it must be a positive number"),
        (["--alerts-per-day", "9", "--rows-per-day", "5"], "error: --alerts-per-day is 9 of 5 rows"),
    ],
)
def test_threshold_refuses_in_one_line(capsys: Capture, folder: Path, words: list[str], message: str) -> None:
    done = fedauc(capsys, "threshold", str(folder), *words)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_export_writes_the_formats_and_names_the_files(capsys: Capture, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    done = fedauc(capsys, "export", str(folder), "--to", "safetensors, joblib", "--out", str(out))
    assert done.code == 0, done.err
    assert done.out.split() == [str(out / "model.safetensors"), str(out / "model.joblib")]
    assert sorted(path.name for path in out.iterdir()) == ["model.joblib", "model.safetensors"]
    assert "unknown format 'tf'" in fedauc(capsys, "export", str(folder), "--to", "tf", "--out", str(out)).err
