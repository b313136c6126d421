"""What a new user met on the command line: silent runs, paths that are not named, results that mislead."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import pytest

from cli_helpers import fedauc
from fedauc.data.datasets.synthetic import Synthetic
from fedauc.experiments.decisions import log_once
from fedauc.experiments.run_loop import Progress
from fedauc.reports.progress import open_progress

TINY = (
    *("--data", "synthetic", "--data.clients", "6", "--data.rows-per-client", "40"),
    *("--cycles", "2", "--local-steps", "2", "--groups", "3"),
)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The system refuses to write files larger than this, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_of_progress_is_in_the_log_before_the_run_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file, redirect_stderr(file), open_progress() as lines:
        observe = lines.add_bar("run")
        observe(Progress(0, 100, None))
        assert log.read_text() == "run: 100 rounds\n"
        for done in range(1, 21):
            observe(Progress(done, 100, {"auc": 0.75}))
        assert log.read_text().splitlines()[1:] == ["run: training, round 20 of 100, test AUC 0.7500, about 1 s left"]


def test_a_redirected_run_says_phase_round_metric_and_time_left(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    outcome = fedauc(capsys, "run", *TINY, "--out", str(tmp_path / "run"))
    lines = [line for line in outcome.err.splitlines() if line.startswith("cycp-pairwise: ")]
    assert lines[0] == "cycp-pairwise: 9 rounds"
    assert lines[1] == "cycp-pairwise: scoring, round 2 of 9, about 1 s left"
    assert lines[2] == "cycp-pairwise: training, round 4 of 9, about 1 s left"
    assert lines[-1].startswith("cycp-pairwise: done, round 9 of 9, test AUC 0.")
    assert len(lines) == 6


def test_notes_say_what_was_decided_and_that_sites_are_simulated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log_once.cache_clear()
    outcome = fedauc(capsys, "run", *TINY, "--out", str(tmp_path / "run"))
    notes = " ".join(outcome.err.split())
    assert "note: 6 sites are simulated in this process, with all rows in one place, in 3 groups at random" in notes
    assert "note: 3 of the 9 rounds of cycp-pairwise only collect scores" in notes
    assert "note: the engine 'batched' trains the clients of a round together cycp-pairwise: 9 rounds" in notes
    stored = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert len(stored["decisions"]) == 3
    assert "simulated" in " ".join(fedauc(capsys, "run", "--help").out.split())


def test_an_existing_folder_that_is_no_run_is_not_to_be_resumed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    outcome = fedauc(capsys, "run", *TINY, "--out", str(tmp_path))
    assert outcome.err == (
        f"error: {tmp_path} exists already; it is not a run folder, and fedauc writes over nothing: "
        "choose another path\n"
    )
    run = tmp_path / "run"
    assert fedauc(capsys, "run", *TINY, "--out", str(run)).code == 0
    assert f"fedauc show {run}" in fedauc(capsys, "run", *TINY, "--out", str(run)).err
    (run / "result.json").unlink()
    assert f"fedauc resume {run}" in fedauc(capsys, "run", *TINY, "--out", str(run)).err


@pytest.mark.parametrize("command", [("run",), ("compare", "--methods", "fedavg")])
def test_a_folder_that_cannot_be_written_is_named_before_the_data_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    def refuse_to_load(self: Synthetic, seed: int) -> None:
        raise AssertionError("the data were loaded first")

    monkeypatch.setattr(Synthetic, "load", refuse_to_load)
    unwritable = fedauc(capsys, *command, *TINY, "--out", "/proc/runs/first")
    assert unwritable.code == 2
    assert unwritable.err.startswith("error: /proc/runs/first cannot be written: /proc says '")
    with largest_file(1000):
        full = fedauc(capsys, *command, *TINY, "--out", str(tmp_path / "deep" / "run"))
    assert full.err == (
        f"error: {tmp_path}/deep/run cannot be written: {tmp_path} says 'file too large'; choose another folder\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_named_with_the_way_to_go_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("run", *TINY, "--model", "mlp", "--model.hidden", "3000", "--out", str(tmp_path / "run"))
    with largest_file(100_000):
        outcome = fedauc(capsys, *words)
    assert outcome.code == 2
    # The first checkpoint does not fit, though the file that was tried before did; no folder was made.
    assert outcome.err.splitlines()[-1].startswith(f"error: {tmp_path}/.run.part/checkpoints/round-00000000.pt: file")
    assert fedauc(capsys, *words).code == 0
    (tmp_path / "run" / "result.json").unlink()
    with largest_file(10):
        outcome = fedauc(capsys, "resume", str(tmp_path / "run"))
    assert outcome.code == 2
    assert f"error: {tmp_path}/run/" in outcome.err
    assert outcome.err.strip().endswith(f": file too large; mend that, then go on with: fedauc resume {tmp_path}/run")


@pytest.mark.parametrize("words", [("run", *TINY, "--out", "made"), ("resume", "made")])
def test_ctrl_c_while_packages_are_imported_is_one_line(tmp_path: Path, words: tuple[str, ...]) -> None:
    program = """
import os, signal, sys

class InterruptInside:
    def find_spec(self, name, path, target=None):
        if name == "torch._utils":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, InterruptInside())
from fedauc.__main__ import main
main()
"""
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr == "interrupted before the first round; nothing was saved\n"
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_method_has_a_row_and_a_reason(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "both"
    methods = ("--methods", "cycp-minimax,cycp-fedavg")
    compared = fedauc(capsys, "compare", *methods, *TINY, "--score", "identity", "--lr", "50", "--out", str(out))
    assert compared.code == 3
    for shown in (compared, fedauc(capsys, "show", str(out))):
        rows = {line.split()[0]: line.split()[1:] for line in shown.out.splitlines() if line}
        assert rows["cycp-minimax"] == ["stopped", "-", "-", "-", "-", "-", "-"]
        assert rows["cycp-fedavg"][0].startswith(".")
        caption = " ".join(shown.out.split())
        assert "cycp-minimax, seed 0: stopped in round" in caption
        # A method that has no scores cannot be the reference of the test.
        assert "against cycp-fedavg" in caption
    assert "| cycp-minimax | stopped |" in (out / "table.md").read_text()


def test_show_explains_rounds_that_only_collect_scores_and_marks_the_saved_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert fedauc(capsys, "run", *TINY, "--cycles", "6", "--lr", "3", "--out", str(out)).code == 0
    shown = " ".join(fedauc(capsys, "show", str(out)).out.split())
    assert "3 of the 21 rounds only collect the scores that later rounds compare with, 18 train" in shown
    summary = json.loads(fedauc(capsys, "show", str(out), "--json").out)
    assert summary["scoring_rounds"] == 3
    assert "after 21 rounds (the model that is saved)" in shown
    assert summary["best"]["round"] < 20
    assert f"best on validation test AUC {summary['best']['auc']:.4f}" in shown
    assert "(the highest validation AUC, not saved: --keep best would save it)" in shown


def test_a_saved_model_that_is_the_best_one_is_shown_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert fedauc(capsys, "run", *TINY, "--cycles", "6", "--lr", "3", "--keep", "best", "--out", str(out)).code == 0
    shown = " ".join(fedauc(capsys, "show", str(out)).out.split())
    assert "(the model that is saved, with the highest validation AUC)" in shown
    assert shown.count(" AP ") == 1
    assert "best on" not in shown


def test_a_model_that_ranks_the_wrong_way_round_is_said_to(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Most training labels are flipped, so that the model learns the opposite of the test labels."""
    sentence = "the model ranks negatives above positives more often than not: lower the learning rate"
    flipped = ("--flip-positives", "0.9", "--flip-negatives", "0.9")
    ran = fedauc(capsys, "run", *TINY, *flipped, "--out", str(tmp_path / "run"))
    assert ran.code == 0, ran.err
    assert f"warning {sentence[0].upper()}{sentence[1:]}" in " ".join(ran.out.split())
    for settings, is_reversed in ((flipped, True), ((), False)):
        out = str(tmp_path / f"both-{is_reversed}")
        compared = fedauc(capsys, "compare", *TINY, *settings, "--methods", "cycp-fedavg", "--out", out)
        assert (f"cycp-fedavg: {sentence}" in " ".join(compared.out.split())) == is_reversed


def test_a_comparison_explains_rounds_that_only_collect_scores_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log_once.cache_clear()
    ran = fedauc(capsys, "compare", *TINY, "--methods", "cycp-pairwise", "--out", str(tmp_path / "one"))
    assert (ran.err + ran.out).count("of the 9 rounds") == 1
    assert "3 of the 9 rounds only" in " ".join(fedauc(capsys, "show", str(tmp_path / "one")).out.split())


def test_show_has_the_auc_of_sites(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert fedauc(capsys, "run", *TINY, "--out", str(out)).code == 0
    sites = json.loads(fedauc(capsys, "show", str(out), "--json").out)["client_auc"]
    values = {site: value for site, value in sites.items() if value is not None}
    worst = min(values, key=lambda site: (values[site], site))
    assert len(sites) == 6
    assert f"AUC from {values[worst]:.4f} ({worst}) to " in " ".join(fedauc(capsys, "show", str(out)).out.split())
    lines = fedauc(capsys, "show", str(out), "--sites").out.splitlines()
    table = lines[next(number for number, line in enumerate(lines) if line.split() == ["site", "AUC"]) + 1 :]
    assert table[0].split()[0] == worst
    assert {line.split()[0] for line in table} == set(sites)


def test_a_missing_package_is_named_and_not_an_index_that_lacks_this_library() -> None:
    source = Path(sys.modules["fedauc"].__file__ or "").parent
    texts = {path: path.read_text() for path in source.rglob("*.py")}
    assert [str(path) for path, text in texts.items() if "pip install 'fedauc[" in text] == []
    program = "import sys; sys.modules['typer'] = None; from fedauc.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "error: the command line needs typer, which is not installed: run pip install typer rich matplotlib\n"
    )
