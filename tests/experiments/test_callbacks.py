"""Early stopping, the best model, and callbacks of one's own: in runs, resumed runs, run groups and `fit`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from fedauc import fit
from fedauc.data.datasets.synthetic import Synthetic
from fedauc.experiments.callbacks import Callback, choose_callbacks
from fedauc.experiments.callbacks.best_model import BestModel
from fedauc.experiments.callbacks.early_stopping import EarlyStopping
from fedauc.experiments.callbacks.progress_line import ProgressLine
from fedauc.experiments.comparison import Comparison
from fedauc.experiments.config import Config
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.run_loop import Progress, RunPaused
from fedauc.experiments.run_view import RunView
from fedauc.experiments.runner import Run
from fedauc.guards import TrainingStopped
from fedauc.interfaces import Model
from fedauc.metrics.metric import Measurement, Metric
from fedauc.objectives.contrastive import Contrastive
from fedauc.objectives.square import PairwiseSquare
from fedauc.reports.summary import summarize_run
from fedauc.trees import Tree
from small_federations import held_out, linear_scorer, same_bits, small_federation, small_recipe

CYCLES = 12


def make_config(method: str = "a-scaffold", **changes: Any) -> Config:
    """Up to twelve cycles of two rounds; with a large learning rate the validation AUC rises and falls."""
    settings: dict[str, Any] = {
        "cycles": CYCLES,
        "groups": 2,
        "local_steps": 2,
        "dtype": "float64",
        "learning_rate": 3.0,
    }
    recipe = Recipe.of(method, **(settings | changes))
    return Config(recipe=recipe, data=Synthetic(clients=4, rows_per_client=30))


def read_results(folder: Path) -> dict[str, bytes]:
    """What a finished run has written, without its checkpoints and seconds."""
    names = ("records.jsonl", "result.json", "model.pt", "scores.npz", "config.json")
    return {name: (folder / name).read_bytes() for name in names}


def pause_at(round: int) -> Callable[[Progress], None]:
    def observe(progress: Progress) -> None:
        if progress.done == round:
            raise RunPaused

    return observe


def expected_stop(values: list[float], patience: int) -> int | None:
    """The evaluation that uses up the patience, by hand."""
    best, waited = -np.inf, 0
    for number, value in enumerate(values):
        best, waited = (value, 0) if value > best else (best, waited + 1)
        if waited == patience:
            return number
    return None


@dataclass(frozen=True)
class Collect(Callback):
    """Collects what each hook sees."""

    calls: list[str] = field(default_factory=list)

    def on_round_end(self, run: RunView, state: Tree) -> None:
        self.calls.append(f"round {run.rounds_done}, {len(run.records)} records")

    def on_evaluation(self, run: RunView, state: Tree) -> None:
        self.calls.append(f"evaluation {run.rounds_done}, {len(run.records)} records")

    def on_checkpoint(self, run: RunView, state: Tree) -> None:
        self.calls.append(f"checkpoint {run.rounds_done}")

    def on_finish(self, run: RunView, state: Tree) -> None:
        self.calls.append("finish")

    def on_failure(self, run: RunView, state: Tree, reason: str) -> None:
        self.calls.append(reason)


def make_fixed_metric(*values: float) -> Metric:
    """A metric whose values are written down in advance."""
    remaining = iter(values)

    @dataclass(frozen=True)
    class FixedMetric(Metric):
        name: ClassVar[str] = "fixed"

        def measure(self, labels: np.ndarray, scores: np.ndarray) -> Measurement:
            return Measurement(next(remaining))

    return FixedMetric()


# ------------------------------------------------------------------------------------------------------ early stopping


@pytest.mark.parametrize("patience", [1, 2])
def test_an_early_stop_is_a_normal_end(tmp_path: Path, patience: int) -> None:
    """The records are the first ones of a whole run; model, scores, result and checkpoint are all there."""
    Run.create(make_config(), tmp_path / "whole").train_to_end()
    whole = Run.resume(tmp_path / "whole").folder.read_records()
    values = [record["validation_auc"] for record in whole]
    last = expected_stop(values, patience)
    assert last is not None
    run = Run.create(make_config(patience=patience), tmp_path / "run")
    result = run.train_to_end()
    assert run.folder.read_records() == whole[: last + 1]
    assert result["final"] == whole[last]
    best = max(values[: last + 1])
    evaluations = "1 evaluation" if patience == 1 else "2 evaluations"
    assert result["stopped_early"] == f"validation_auc has not risen above {best:.6g} for {evaluations}"
    assert set(read_results(tmp_path / "run")) <= {path.name for path in (tmp_path / "run").iterdir()}
    assert not (tmp_path / "run" / "stopped.txt").exists()
    assert (tmp_path / "run" / "checkpoints" / f"round-{whole[last]['round'] + 1:08d}.pt").is_file()
    summary = summarize_run(run.folder)
    assert (summary["status"], summary["rounds"]) == ("done", whole[last]["rounds"])
    assert summary["stopped_early"] == result["stopped_early"]


def test_resuming_in_the_middle_of_patience_gives_the_same_bits(tmp_path: Path) -> None:
    config = make_config(patience=2, keep="best")
    Run.create(config, tmp_path / "alone").train_to_end()
    expected, rounds = (
        read_results(tmp_path / "alone"),
        Run.resume(tmp_path / "alone").folder.read_records()[-1]["rounds"],
    )
    assert rounds < 2 * CYCLES
    for round in range(1, rounds + 1):
        folder = tmp_path / str(round)
        with pytest.raises(RunPaused):
            Run.create(config, folder).train_to_end(pause_at(round))
        Run.resume(folder).train_to_end()
        assert read_results(folder) == expected, f"paused after round {round}"


def test_a_run_that_ended_early_without_a_result_trains_no_further(tmp_path: Path) -> None:
    """As if the process had been killed between the last checkpoint and the result."""
    Run.create(make_config(patience=1), tmp_path / "run").train_to_end()
    expected = read_results(tmp_path / "run")
    for name in ("result.json", "model.pt", "scores.npz"):
        (tmp_path / "run" / name).unlink()
    progress: list[Progress] = []
    Run.resume(tmp_path / "run").train_to_end(progress.append)
    assert read_results(tmp_path / "run") == expected
    assert len(progress) == 1
    assert progress[0].done == progress[0].rounds


def test_runs_of_a_group_stop_early_each_by_itself(tmp_path: Path) -> None:
    configs = {
        f"seed-{seed}": make_config("cycp-fedavg", patience=1, keep="best", engine="graphed", seed=seed)
        for seed in range(3)
    }
    assert Comparison.create(tmp_path / "group", configs).train_runs(lambda name: lambda progress: None) == {}
    rounds = set()
    for name, config in configs.items():
        Run.create(config, tmp_path / name).train_to_end()
        assert read_results(tmp_path / "group" / name) == read_results(tmp_path / name)
        rounds.add(Run.resume(tmp_path / name).folder.read_records()[-1]["rounds"])
    assert len(rounds) > 1, "the runs stop at different times"


# ------------------------------------------------------------------------------------------------------- the best model


@pytest.mark.parametrize("stage_output", ["last", "ema"])
def test_the_kept_model_is_that_of_the_best_round(tmp_path: Path, stage_output: str) -> None:
    run = Run.create(make_config(keep="best", stage_output=stage_output), tmp_path / "run")
    models: dict[int, Model] = {}

    def collect_model(progress: Progress) -> None:
        models[progress.done - 1] = run.loop.evaluated_model()

    result, records = run.train_to_end(collect_model), run.folder.read_records()
    best = max(records, key=lambda record: record["validation_auc"])
    assert best["round"] < records[-1]["round"], "otherwise the last round would be the best one"
    assert result["kept_round"] == best["round"]
    assert result["final"] == best
    module = run.assembly.network.build_module(models[best["round"]])
    stored = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    assert all(torch.equal(stored[name], weight) for name, weight in module.state_dict().items())
    labels, scores = run.folder.read_scores()
    ranks = np.argsort(np.argsort(scores))[labels == 1] + 1
    m, n = int((labels == 1).sum()), int((labels == 0).sum())
    assert (ranks.sum() - m * (m + 1) / 2) / (m * n) == pytest.approx(best["auc"], abs=1e-12)
    assert summarize_run(run.folder)["final"]["auc"] == best["auc"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": "best"}, "keep is 'best', but there are no validation rows to compare rounds by"),
        ({"patience": 3}, "patience is 3, but there are no validation rows to compare rounds by"),
    ],
)
def test_nothing_is_chosen_by_test_rows(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(linear_scorer(), small_federation(), "cycp-minimax", test=held_out(), **changes)
    callback = EarlyStopping(3) if "patience" in changes else BestModel()
    with pytest.raises(ValueError, match="which needs validation rows: hold some out, or leave it out"):
        fit(linear_scorer(), small_federation(), small_recipe("cycp-minimax"), test=held_out(), callbacks=[callback])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": "best", "callbacks": ["best-model"]}, "keep is 'best', and callbacks lists 'best-model' too"),
        ({"patience": 3, "callbacks": ["early-stopping"]}, "patience is 3, and callbacks lists 'early-stopping' too"),
    ],
)
def test_what_an_option_asks_for_is_not_asked_for_again(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(linear_scorer(), small_federation(), "cycp-minimax", validation=held_out(), **changes)


def test_missing_validation_rows_are_told_with_the_callbacks_name() -> None:
    recipe = small_recipe("cycp-minimax")
    with pytest.raises(ValueError, match=r"^callbacks lists 'early-stopping', which needs validation rows"):
        choose_callbacks(recipe, [EarlyStopping(5)], has_validation=False)
    how = "raise --data.validation-fraction"
    with pytest.raises(ValueError, match=r"rounds by: raise --data\.validation-fraction, or leave keep at its default"):
        choose_callbacks(replace(recipe, keep="best"), [], has_validation=False, how_to_hold_out=how)


def test_patience_that_ends_in_the_last_round_is_no_early_stop() -> None:
    """Early stopping asks to stop exactly when all rounds are done."""
    fitted = fit(
        linear_scorer(),
        small_federation(),
        small_recipe("cycp-minimax", cycles=3, patience=2),
        validation=held_out(),
        metrics=[make_fixed_metric(1.0, 0.5, 0.5)],
    )
    assert (len(fitted.history), fitted.stopped_early) == (3, None)


def test_a_metric_that_is_nan_is_named_as_such() -> None:
    for values, reason in (
        ([math.nan] * 5, "validation_fixed has been NaN or -inf for 2 evaluations"),
        ([0.5, math.nan, math.nan, 1.0], "validation_fixed is NaN and has not risen above 0.5 for 2 evaluations"),
    ):
        recipe = small_recipe("cycp-minimax", cycles=5, patience=2)
        metric = make_fixed_metric(*values)
        fitted = fit(linear_scorer(), small_federation(), recipe, validation=held_out(), metrics=[metric])
        assert fitted.stopped_early == reason


# ------------------------------------------------------------------------------------------------------------ the hooks


def test_hooks_are_called_in_order() -> None:
    """Two cycles of three rounds."""
    collect = Collect()
    fit(linear_scorer(), small_federation(), small_recipe("cycp-minimax"), test=held_out(), callbacks=[collect])
    rounds = [f"round {number}, {number > 3:d} records" for number in range(1, 7)]
    evaluations = ["evaluation 3, 1 records", "evaluation 6, 2 records"]
    assert collect.calls == [*rounds[:3], evaluations[0], *rounds[3:], evaluations[1], "finish"]


def test_a_callback_hears_of_a_failure() -> None:
    collect = Collect()
    recipe = small_recipe("cycp-pairwise", objective=PairwiseSquare(), learning_rate=1e6, cycles=50)
    with pytest.raises(TrainingStopped) as stopped:
        fit(linear_scorer(), small_federation(), recipe, callbacks=[collect])
    assert collect.calls[-1] == str(stopped.value)


@dataclass(frozen=True)
class LookAtClients(Callback):
    """Counts each client's rows, and scores and overwrites its copy of them."""

    seen: list[tuple[int, int]]

    def on_evaluation(self, run: RunView, state: Tree) -> None:
        for client in range(run.client_count):
            rows = run.client_examples(client)
            if len(rows.labels):
                expected = run.build_module()(rows.inputs).flatten().detach().numpy()
                assert np.allclose(run.score_rows(rows.inputs), expected, rtol=1e-12)
            self.seen.append((int(rows.labels.sum()), int((rows.labels == 0).sum())))
            rows.inputs.zero_()


def test_a_callback_sees_copies_of_the_clients_rows() -> None:
    clients, seen = small_federation(), list[tuple[int, int]]()
    recipe = small_recipe("cycp-minimax", cycles=1)
    fitted = fit(linear_scorer(), clients, recipe, test=held_out(), callbacks=[LookAtClients(seen)])
    assert seen == list(zip(clients.census.positives.tolist(), clients.census.negatives.tolist(), strict=True))
    again = fit(linear_scorer(), small_federation(), recipe, test=held_out())
    assert same_bits(fitted.state.server, again.state.server)


@dataclass(frozen=True)
class Broken(Callback):
    """Divides by zero in one hook."""

    name: ClassVar[str] = "broken"
    hook: str = "on_evaluation"

    def on_evaluation(self, run: RunView, state: Tree) -> None:
        assert self.hook != "on_evaluation" or 1 / 0

    def on_finish(self, run: RunView, state: Tree) -> None:
        assert self.hook != "on_finish" or 1 / 0


@pytest.mark.parametrize("hook", ["on_evaluation", "on_finish"])
def test_an_error_in_a_hook_names_the_callback(hook: str) -> None:
    message = rf"^callback 'broken' failed in {hook}: ZeroDivisionError: .* \(test_callbacks.py, line \d+\)$"
    with pytest.raises(ValueError, match=message) as caught:
        fit(linear_scorer(), small_federation(), small_recipe("fedavg"), test=held_out(), callbacks=[Broken(hook)])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@dataclass(frozen=True)
class Accuracy(Metric):
    """Returns a number instead of a measurement."""

    name: ClassVar[str] = "accuracy"

    def measure(self, labels: np.ndarray, scores: np.ndarray) -> Any:
        return float(np.mean((scores > 0) == labels))


@pytest.mark.parametrize("part", ["test", "validation"])
def test_a_metric_that_returns_a_number_is_named(part: str) -> None:
    rows: dict[str, Any] = {part: held_out()}
    with pytest.raises(ValueError, match="metric 'accuracy' has returned a float; it must return a Measurement"):
        fit(linear_scorer(), small_federation(), small_recipe("fedavg"), metrics=[Accuracy()], **rows)


@dataclass(frozen=True)
class ClearModel(Callback):
    """Overwrites its copy of the model in every hook."""

    def on_round_end(self, run: RunView, state: Tree) -> None:
        run.model.weights.zero_()

    def on_evaluation(self, run: RunView, state: Tree) -> None:
        run.model.weights.zero_()
        assert run.model.weights.any()


@pytest.mark.parametrize("stage_output", ["last", "ema"])
def test_a_callback_cannot_change_the_model_that_is_trained(stage_output: str) -> None:
    recipe = small_recipe("cycp-minimax", stage_output=stage_output)
    fitted, expected = (
        fit(linear_scorer(), small_federation(), recipe, test=held_out(), callbacks=callbacks)
        for callbacks in ([ClearModel()], [])
    )
    assert same_bits(fitted.state.server, expected.state.server)
    assert fitted.history == expected.history


def test_a_progress_line_is_printed_for_each_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small_recipe("cycp-minimax", cycles=3)
    fitted = fit(linear_scorer(), small_federation(), recipe, test=held_out(), callbacks=["progress-line"])
    lines = capsys.readouterr().err.splitlines()
    quality = fitted.history[0][1]
    assert lines[0] == f"round 3 of 9: auc {quality.auc:.4f}, ap {quality.average_precision:.4f}"
    assert len(lines) == 3
    fit(linear_scorer(), small_federation(), recipe, test=held_out(), callbacks=[ProgressLine(every=2)])
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["round 6 of 9", "round 9 of 9"]


# --------------------------------------------------------------------------------------------- configurations and files


def test_a_callback_survives_the_configuration_file(tmp_path: Path) -> None:
    config = replace(make_config(), callbacks=(ProgressLine(every=3),), metrics=("pauc", "auc"))
    assert Config.from_json(config.to_json()) == config
    assert config.metrics == ("pauc@0.05", "auc")


def test_a_callback_without_a_name_is_for_python_only() -> None:
    with pytest.raises(ValueError, match=r"callbacks holds Collect.*, which has no name for a configuration"):
        replace(make_config(), callbacks=(Collect(),))


def test_without_callbacks_checkpoints_have_the_entries_that_they_had(tmp_path: Path) -> None:
    """So checkpoints from before there were callbacks are read as they are."""
    Run.create(make_config(cycles=1), tmp_path / "run").train_to_end()
    path = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    content = torch.load(_payload(path), weights_only=True)
    assert {"callbacks", "stop_reason"}.isdisjoint(content)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert {"kept_round", "stopped_early"}.isdisjoint(result)


def _payload(path: Path) -> Any:
    import io

    return io.BytesIO(path.read_bytes().partition(b"\n")[2])


# ------------------------------------------------------------------------------------------------------------------ fit


def test_fit_returns_the_best_model_and_what_training_needs_to_go_on() -> None:
    recipe = small_recipe("a-scaffold", cycles=8, learning_rate=3.0, keep="best", patience=2)
    validation = held_out(rows=120)
    fitted = fit(
        linear_scorer(),
        small_federation(),
        recipe,
        test=held_out(),
        validation=validation,
        metrics=["pauc@0.2", "auc"],
    )
    values = [quality["validation_pauc@0.2"] for _, quality in fitted.history]
    assert list(fitted.history[0][1]) == ["pauc@0.2", "auc", "low", "high", "validation_pauc@0.2"]
    best = int(np.argmax(values))
    assert fitted.round == fitted.history[best][0]
    assert fitted.stopped_early is not None
    assert len(values) - 1 == expected_stop(values, 2)
    with torch.no_grad():
        scores = fitted.module(validation.inputs).flatten().numpy()
    assert np.array_equal(fitted.scores(validation.inputs), scores)
    assert fitted.state.round == fitted.history[-1][0] + 1
    # Client 2 holds nothing.
    assert set(fitted.client_states) == {0, 1, 3, 4, 5, 6, 7}


def test_validation_rows_alone_are_enough() -> None:
    recipe = small_recipe("cycp-minimax", keep="best")
    fitted = fit(linear_scorer(), small_federation(), recipe, validation=held_out())
    assert list(fitted.history[0][1]) == ["validation_auc"]


def test_a_metric_of_scores_is_refused_for_embeddings() -> None:
    x = np.random.default_rng(0).normal(size=(40, 4))
    settings: dict[str, Any] = {"objective": Contrastive(), "groups": 3, "test": (x, np.arange(40) % 2)}
    with pytest.raises(ValueError, match=r"metric 'pauc@0\.05' needs one score per row.*; use metric 'auc'"):
        fit(nn.Linear(4, 3), small_federation(), metrics=["auc", "pauc"], **settings)
