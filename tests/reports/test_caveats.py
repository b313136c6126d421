"""Results on rows that only stand in for others say so first; results on other rows are as they were."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cli_helpers import fedauc
from fedauc.experiments.comparison import Comparison
from fedauc.reports.caveats import has_caveat, list_caveats, shorten_note
from fedauc.reports.curves import draw_curves

SHORT = ("--cycles", "1", "--local-steps", "1", "--groups", "2")
DRAWN = ("--data", "medicare-like", "--data.rows", "2000", *SHORT)
KIND = "SYNTHETIC medicare-like: 2000 synthetic rows of 50 states to train on"
# 0.07 % of 2000 rows would be 1: the dataset draws 2 at least, so that an AUC has an interval.
NOTE = f"{KIND}; 2000 of 2000 training rows, 2 labelled positive, over 50 clients (0 empty)"
METHODS = ("--methods", "cycp-fedavg,fedavg")
STEPS = ("--vary", "learning-rate=0.1,0.01")
NEVER = ("--method", "cycp-minimax", "--score", "identity", "--lr", "1e9", "--cycles", "20")


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def own_rows(folder: Path) -> tuple[str, ...]:
    """Options for a small file of one's own."""
    rows = np.arange(40)
    arrays = {"x": np.linspace(-1, 1, 80).reshape(40, 2), "y": rows % 3 == 0, "client": rows // 10}
    np.savez(folder / "rows.npz", allow_pickle=False, **arrays)
    return ("--data", "table", "--data.path", str(folder / "rows.npz"), *SHORT)


def begins_with_the_note(out: str) -> bool:
    """Whether the note comes first, folded between words to two lines of 80 columns, and only there."""
    first, second = out.splitlines()[:2]
    folded = max(len(first), len(second)) <= 80 and f"{first.rstrip()} {second.rstrip()}" == NOTE
    return folded and out.count(KIND) == 1


def forget_the_note(run: Path) -> None:
    """Make a run folder as it was before the note was written down at the start."""
    environment = json.loads((run / "environment.json").read_text())
    del environment["note"]
    (run / "environment.json").write_text(json.dumps(environment))


def test_a_note_tells_rows_that_only_stand_in() -> None:
    assert has_caveat("STAND-IN for others")
    assert has_caveat("SYNTHETIC rows")
    assert not has_caveat("rows of hospitals, no STAND-IN and nothing SYNTHETIC")
    assert not has_caveat("")


def test_a_title_ends_at_the_first_comma_or_semicolon_outside_a_number() -> None:
    assert shorten_note("STAND-IN for X: 4,999 images, mass or none; 9 rows") == "STAND-IN for X: 4,999 images"
    assert shorten_note("SYNTHETIC x: 7 rows; 9 of 9") == "SYNTHETIC x: 7 rows"
    assert shorten_note("SYNTHETIC x") == "SYNTHETIC x"


def test_run_show_and_resume_begin_with_the_note(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    for arguments in (("run", *DRAWN, "--out", out), ("show", out), ("resume", out)):
        outcome = fedauc(capsys, *arguments)
        assert outcome.code == 0, outcome.err
        assert begins_with_the_note(outcome.out), outcome.out
        assert outcome.out.splitlines()[2].startswith("method ")
    assert json.loads(fedauc(capsys, "show", out, "--json").out)["data"] == NOTE


def test_an_unfinished_run_is_labelled_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    fedauc(capsys, "run", *DRAWN, "--out", str(out))
    # As if it had been killed before its end.
    (out / "result.json").unlink()
    shown = fedauc(capsys, "show", str(out)).out
    assert "unfinished" in shown
    assert begins_with_the_note(shown), shown


def test_a_finished_older_run_is_left_as_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    fedauc(capsys, "run", *DRAWN, "--out", str(out))
    forget_the_note(out)
    before = (out / "environment.json").read_bytes()
    # Its result has the note.
    assert begins_with_the_note(fedauc(capsys, "resume", str(out)).out)
    assert (out / "environment.json").read_bytes() == before


@pytest.mark.parametrize("command", [("compare", *METHODS), ("sweep", *STEPS)])
def test_comparisons_and_sweeps_begin_with_the_note(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    out = tmp_path / "several"
    for arguments in ((*command, *DRAWN, "--out", str(out)), ("show", str(out)), ("resume", str(out))):
        outcome = fedauc(capsys, *arguments)
        assert outcome.code == 0, outcome.err
        assert begins_with_the_note(outcome.out), outcome.out
    # A blank line between: otherwise Markdown takes the table for a part of the sentence.
    assert (out / "table.md").read_text().startswith(f"{NOTE}\n\n| ")
    assert [run["data"] for run in json.loads(fedauc(capsys, "show", str(out), "--json").out)] == [NOTE] * 2
    for result in out.rglob("result.json"):
        result.unlink()
    assert begins_with_the_note(fedauc(capsys, "show", str(out)).out)


def test_curves_have_the_short_note_as_their_title(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, data, title in (("drawn", DRAWN, KIND), ("own", own_rows(tmp_path), "")):
        assert fedauc(capsys, "compare", *METHODS, *data, "--out", str(tmp_path / name)).code == 0
        assert draw_curves(list(Comparison(tmp_path / name).run_folders())).get_suptitle() == title


def test_other_data_have_no_label(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = own_rows(tmp_path)
    run = fedauc(capsys, "run", *data, "--out", str(tmp_path / "run"))
    assert run.out.startswith("method ")
    assert "data" not in json.loads(fedauc(capsys, "show", str(tmp_path / "run"), "--json").out)
    for command, first in ((("compare", *METHODS), "method"), (("sweep", *STEPS), "setting")):
        out = tmp_path / command[0]
        assert fedauc(capsys, *command, *data, "--out", str(out)).out.startswith(f"{first} ")
        assert (out / "table.md").read_text().startswith(f"| {first} |")


def test_beside_another_dataset_a_label_says_whose_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, _, *own = own_rows(tmp_path)
    both = ("--vary", "data=medicare-like,table", "--data.rows", "2000")
    assert fedauc(capsys, "sweep", *both, *own, "--out", str(tmp_path / "both")).code == 0
    assert list_caveats(Comparison(tmp_path / "both").run_folders()) == [f"{NOTE} (data medicare-like)"]


def test_each_kind_of_rows_has_its_label(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ("--data", "medicare-like", "--vary", "data.rows=2000,2100")
    assert fedauc(capsys, "sweep", *sizes, *SHORT, "--out", str(tmp_path / "sizes")).code == 0
    assert list_caveats(Comparison(tmp_path / "sizes").run_folders()) == [NOTE, NOTE.replace("2000", "2100")]


def test_runs_that_differ_in_their_counts_share_a_label(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    outcome = fedauc(capsys, "sweep", "--vary", "flip-negatives=0,0.1", *DRAWN, "--out", str(out))
    assert outcome.out.splitlines()[0] == KIND
    assert outcome.out.count("SYNTHETIC") == 1
