"""Tuning: trials that are ranked by validation rows, go on after an interruption, and say what they search."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import fedauc
from fedauc.experiments import tuning as tuning_module
from fedauc.experiments.options import build_config
from fedauc.experiments.run_loop import Observer, Progress, RunPaused
from fedauc.experiments.search_space import Dimension, SearchSpace
from fedauc.experiments.tuning import Tuning, name_trial

DATA = {"data": "synthetic", "data.clients": "6", "data.rows-per-client": "30"}

SMALL = {**DATA, "cycles": "2", "participation.groups": "3", "dtype": "float64"}
"""Three groups of two clients: two cycles and a scoring cycle are nine rounds."""

SEARCH = ("learning-rate=0.01:1:log", "local-steps=1:3", "weighting=clients,pooled")


def make_space(search: Sequence[str] = SEARCH, method: str = "cycp-pairwise", **changes: str) -> SearchSpace:
    texts = SMALL | {name.replace("__", ".").replace("_", "-"): text for name, text in changes.items()}
    return SearchSpace.of(build_config(method, None, {"keep": "best", **texts}), search, texts, {"lr": "learning-rate"})


def ignore_progress(name: str) -> Observer:
    return lambda progress: None


def run_tuning(path: Path, trials: int, space: SearchSpace | None = None, **settings: Any) -> Tuning:
    tuning = Tuning.open_or_create(path, space or make_space(), trials, **settings)
    tuning.run_trials(ignore_progress)
    return tuning


def read_trial(tuning: Tuning, number: int) -> dict[str, bytes]:
    folder = tuning.path / name_trial(number)
    return {name: (folder / name).read_bytes() for name in ("config.json", "records.jsonl", "result.json")}


def test_an_interrupted_tuning_goes_on_to_the_same_trials(tmp_path: Path) -> None:
    """It is left in the middle of the third of four trials, whose run is resumed and not begun again."""
    whole = run_tuning(tmp_path / "whole", 4)
    broken = Tuning.open_or_create(tmp_path / "broken", make_space(), 4)

    def interrupt(name: str) -> Observer:
        def observe(progress: Progress) -> None:
            if name == "trial 2" and progress.done == 7:
                raise RunPaused

        return observe

    with pytest.raises(RunPaused):
        broken.run_trials(interrupt)
    assert [trial.state for trial in broken.list_trials()] == ["done", "done", "unfinished"]
    begin = dict[str, int]()

    def note_begin(name: str) -> Observer:
        def observe(progress: Progress) -> None:
            begin.setdefault(name, progress.done)

        return observe

    Tuning(broken.path).run_trials(note_begin)
    assert begin == {"trial 2": 7, "trial 3": 0}
    assert broken.list_trials() == whole.list_trials()
    for number in range(4):
        assert read_trial(broken, number) == read_trial(whole, number)
    # A tuning that has all its trials leaves everything as it is, and a larger one goes on.
    Tuning(broken.path).run_trials(ignore_progress)
    grown = run_tuning(broken.path, 5)
    assert [trial for trial in grown.list_trials() if trial.number < 4] == whole.list_trials()


def test_trials_are_ranked_by_the_validation_metric_of_the_model_that_they_save(tmp_path: Path) -> None:
    tuning = run_tuning(tmp_path / "tuned", 3)
    trials = tuning.list_trials()
    values = [trial.value or 0.0 for trial in trials]
    assert values == sorted(values, reverse=True)
    for trial in trials:
        run = tuning.open_run(trial.number)
        assert trial.value == run.read_result()["final"]["validation_auc"]
        assert trial.value == max(record["validation_auc"] for record in run.read_records())
        recipe = run.config.recipe
        assert trial.options == {
            "learning-rate": repr(recipe.learning_rate),
            "local-steps": str(recipe.local_steps),
            "weighting": recipe.weighting,
        }
        assert 0.01 <= recipe.learning_rate <= 1
        assert 1 <= recipe.local_steps <= 3
    # The proposals are keyed by the seed of the runs.
    assert len({tuple(trial.options.items()) for trial in trials}) == 3


def test_a_trial_below_the_median_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One finished trial is enough to compare with here; equal trials are not below it."""
    monkeypatch.setattr(tuning_module, "TRIALS_BEFORE_PRUNING", 1)
    space = make_space(["learning-rate=0.0001,0.3"], cycles="4", model="mlp")
    tuning = run_tuning(tmp_path / "pruned", 5, space, prune=True)
    stopped = [trial for trial in tuning.list_trials() if trial.state == "stopped"]
    best = tuning.list_trials()[0]
    assert stopped
    for trial in stopped:
        assert trial.options != best.options
        assert not tuning.open_run(trial.number).done


def test_a_trial_that_diverges_is_no_end_of_the_tuning(tmp_path: Path) -> None:
    """At learning rate 0.3 unbounded scores diverge in the second cycle, at 0.01 they do not."""
    space = make_space(["learning-rate=0.01,0.3"], "cycp-minimax", objective__score="identity", cycles="3")
    tuning = run_tuning(tmp_path / "diverging", 4, space)
    states = {trial.options["learning-rate"]: trial.state for trial in tuning.list_trials()}
    assert states == {"0.01": "done", "0.3": "stopped"}


def test_options_of_a_member_are_searched_where_the_trial_has_it(tmp_path: Path) -> None:
    space = make_space(["objective.scale=0.5:2", "objective=sigmoid,square"])
    trials = run_tuning(tmp_path / "members", 4, space).list_trials()
    assert {trial.options["objective"] for trial in trials} == {"sigmoid", "square"}
    for trial in trials:
        assert ("objective.scale" in trial.options) == (trial.options["objective"] == "sigmoid")


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, ["learning-rate", "local-steps", "weighting", "objective.scale"]),
        ({"local_steps": "4"}, ["learning-rate", "weighting", "objective.scale"]),
        ({"preset": "as-printed"}, ["learning-rate", "local-steps", "objective.scale"]),
        ({"model": "mlp", "objective": "square"}, ["learning-rate", "local-steps", "weighting", "model.hidden"]),
        (
            {"model": "tabular"},
            ["learning-rate", "local-steps", "weighting", "objective.scale", "model.width", "model.hidden"],
        ),
    ],
    ids=["linear", "fixed", "preset", "mlp", "tabular"],
)
def test_the_default_search_has_what_method_and_model_have(changes: dict[str, str], options: list[str]) -> None:
    assert [dimension.option for dimension in make_space((), **changes).dimensions] == options


BAD: dict[str, tuple[list[str], list[str]]] = {
    "no range": (["learning-rate"], ["'learning-rate'", "option=low:high"]),
    "no number": (["learning-rate=a:b"], ["'learning-rate=a:b'", "numbers"]),
    "upside down": (["learning-rate=1:0.1"], ["low is below high"]),
    "another scale": (["learning-rate=0.1:1:exp"], ["low:high:log"]),
    "a logarithm of zero": (["learning-rate=0:1:log"], ["above 0"]),
    "infinite": (["learning-rate=0.1:inf"], ["low is below high"]),
    "unknown": (["learning-rat=0.1:1"], ["did you mean 'learning-rate'"]),
    "twice": (["lr=0.1:1", "learning-rate=0.1:1"], ["learning-rate twice"]),
    "fixed": (["participation.groups=2:3"], ["participation.groups is 3 and searched too"]),
    "a seed": (["seed=1:9"], ["not comparable"]),
    "a bad value": (["weighting=clients,rows"], ["weighting is 'rows'"]),
    "a bad bound": (["learning-rate=-1:1"], ["learning_rate is -1.0", "above 0"]),
    "not an option of the method": (["algorithm.prox=0.1:1"], ["algorithm.prox is not a parameter"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_search_is_one_line(case: str) -> None:
    search, expected = BAD[case]
    with pytest.raises(ValueError) as caught:
        make_space(search)
    message = str(caught.value)
    assert all(word in message for word in expected), message
    assert "\n" not in message


def test_a_search_is_written_as_it_is_read() -> None:
    for text in ("learning-rate=0.01:1.0:log", "local-steps=1.0:3.0", "weighting=clients,pooled"):
        assert Dimension.parse(text, {}).to_text() == text


def test_the_command_prints_the_best_trials_and_the_test_auc_of_the_winner_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "tuned"
    typed = [word for option, text in SMALL.items() for word in (f"--{option}", text)]
    typed[typed.index("--participation.groups")] = "--groups"
    command = ("tune", *typed, "--trials", "3", "--search", "lr=0.01:1:log", "--search", "local-steps=1:3")
    ran = fedauc(capsys, *command, "--out", str(out))
    assert ran.code == 0, ran.err
    *table, best, again = ran.out.splitlines()
    assert max(map(len, table)) <= 80
    trials = json.loads(fedauc(capsys, "show", str(out), "--json").out)
    assert [line.split()[0] for line in table[1:4]] == [str(trial["number"]) for trial in trials]
    final = json.loads((out / name_trial(trials[0]["number"]) / "result.json").read_text())["final"]
    assert f"test AUC {final['auc']:.4f} [{final['low']:.4f}, {final['high']:.4f}]" in best
    tested = {
        json.loads((out / f"{name_trial(number)}/result.json").read_text())["final"]["auc"] for number in range(3)
    }
    shown = ran.out + ran.err
    assert [auc for auc in tested if f"{auc:.4f}" in shown or f"{auc:.4f}"[1:] in shown] == [final["auc"]]
    # The command that it prints trains the same model again.
    words = again.partition("fedauc ")[2].split()
    assert fedauc(capsys, *words).code == 0
    best_folder = out / name_trial(trials[0]["number"])
    records = [(folder / "records.jsonl").read_bytes() for folder in (best_folder, Path(f"{out}-best"))]
    assert records[0] == records[1]
    # The same command, `resume` and `show` repeat what was printed.
    assert fedauc(capsys, *command, "--out", str(out)).out == ran.out
    assert fedauc(capsys, "resume", str(out)).out == ran.out
    assert fedauc(capsys, "show", str(out)).out == ran.out
    other = fedauc(capsys, *command[:-2], "--out", str(out))
    assert (other.code, "began with another value of the search; choose another path" in other.err) == (2, True)
    assert "holds several runs" in fedauc(capsys, "show", str(out), "--sites").err


def test_without_validation_rows_nothing_is_tuned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    ran = fedauc(capsys, "tune", "--data", "creditcard", "--data.validation-fraction", "0", "--out", str(out))
    assert ran.code == 2
    assert "data 'creditcard' has no validation rows" in ran.err
    assert "--data.validation-fraction 0.2" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_without_optuna_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match="tuning needs optuna: run pip install optuna"):
        Tuning.open_or_create(tmp_path / "tuned", make_space(), 3)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tuning.json").write_text('{"trials": 3}')
    with pytest.raises(ValueError, match="tuning\\.json is damaged"):
        Tuning(tmp_path)
