"""`fit`: arrays in, a trained module out, and clear errors when something does not fit."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedauc import Clients, Recipe, Table, TrainingStopped, examples, fit
from fedauc.experiments.callbacks.progress_line import ProgressLine
from fedauc.metrics.pauc import PartialAUC
from fedauc.metrics.roc_auc import AUC
from fedauc.objectives.contrastive import Contrastive
from fedauc.objectives.sigmoid import PairwiseSigmoid
from fedauc.objectives.squared_hinge import SquaredHinge
from fedauc.participation.uniform import Uniform
from fedauc.stages import Geometric
from fedauc.transforms.clip import Clip
from fedauc.transforms.robust_means import Median


def make_rows(count: int = 240, features: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """A fifth positives, shifted by one in every feature."""
    rng = np.random.default_rng(1)
    y = np.arange(count) % 5 == 0
    return rng.normal(size=(count, features)) + y[:, None], y


def make_clients() -> Clients:
    x, y = make_rows()
    return Clients.from_arrays(x, y, client=np.arange(len(y)) // 20)


def test_a_pair_of_arrays_is_a_test_set() -> None:
    x, y = make_rows(100)
    first = fit(nn.Linear(4, 1), make_clients(), test=(x, y), cycles=1, groups=3, seed=1)
    second = fit(first.module, make_clients(), test=examples(x, y), cycles=1, groups=3)
    assert [len(fitted.history) for fitted in (first, second)] == [1, 1]
    assert first.scores(x).shape == (100,)
    assert first.scores(x[:0]).shape == (0,)


def test_members_can_be_given_by_name() -> None:
    recipe = Recipe.of("cycp-pairwise", objective="squared-hinge", participation="uniform", stages="geometric")
    assert recipe.algorithm.objective == SquaredHinge()
    assert (recipe.participation, recipe.stages) == (Uniform(), Geometric())


def test_embeddings_are_trained_and_evaluated_by_pairs() -> None:
    x, y = make_rows(100)
    fitted = fit(nn.Linear(4, 3), make_clients(), objective=Contrastive(margin=2.0), test=(x, y), groups=3, cycles=4)
    quality = fitted.history[-1][1]
    # Same-label pairs end up nearer than pairs of two labels; there is no interval for them.
    assert quality.auc > 0.55
    assert quality.low is None
    assert fitted.scores(x).shape == (100, 3)


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        (nn.Linear(5, 1), {}, r"does not accept rows of shape \(4,\) and type torch.float64"),
        (nn.Linear(4, 2), {}, "gives 2 numbers per row; objective 'sigmoid' needs 1"),
        (nn.Linear(4, 1), {"objective": Contrastive()}, "gives 1 numbers per row; objective 'contrastive' needs at"),
        (nn.LSTM(4, 1), {}, "output is a tuple; it must be one tensor of scores"),
        (nn.Linear(4, 1), {"cycles": 2.5}, "cycles is 2.5; it must be a whole number"),
        (nn.Linear(4, 1), {"objective": "sigmod"}, "did you mean 'sigmoid'"),
        (nn.Linear(4, 1), {"participation": 3}, "participation is 3"),
        (nn.Linear(4, 1), {"stages": "geometrical"}, "did you mean 'geometric'"),
        (
            nn.Linear(4, 1),
            {"local_step": 3},
            "unknown setting of cycp-pairwise 'local_step': did you mean 'local_steps'",
        ),
        (
            nn.Linear(4, 1),
            {"lr": 0.1},
            "'lr': did you mean 'learning_rate'. known: algorithm, .*, learning_rate, .*wrappers$",
        ),
        (nn.Linear(4, 1), {"learning_rate": "big"}, "learning_rate is 'big'; it must be a finite number above 0"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_what_does_not_fit_is_said_in_one_line(module: nn.Module, settings: dict[str, Any], message: str) -> None:
    groups: dict[str, Any] = {} if "participation" in settings else {"groups": 3}
    with pytest.raises(ValueError, match=message) as caught:
        fit(module, make_clients(), "cycp-pairwise", **groups, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": SquaredHinge}, "objective: SquaredHinge is a class; write SquaredHinge()"),
        ({"mean": Median}, "mean: Median is a class; write Median()"),
        ({"transforms": [Clip]}, "transforms: Clip is a class; write Clip()"),
        ({"metrics": [PartialAUC]}, "metrics: PartialAUC is a class; write PartialAUC()"),
        ({"callbacks": ProgressLine}, "callbacks: ProgressLine is a class; write ProgressLine()"),
        ({"metrics": 3}, "metrics holds 3; it must hold names or Metrics: see `fedauc list metrics`"),
        ({"callbacks": [None]}, "callbacks holds None; it must hold names or Callbacks: see `fedauc list callbacks`"),
        (
            {"participation": Uniform(), "order": "fixed"},
            "order is not a parameter of the participation 'uniform', which has: per_round, groups",
        ),
        ({"participation": 3, "groups": 4}, "participation is 3; it must be a Participation, such as Cyclic()"),
        (
            {"validation": make_rows(features=5)},
            "validation has rows of shape (5,), the training rows (4,); give both the same features",
        ),
        ({"test": 3}, "test is a int; give a pair of arrays (inputs, labels), or examples(...)"),
        ({"test": make_rows()[0]}, "test is a ndarray; give a pair of arrays (inputs, labels), or examples(...)"),
        (
            {"validation": (make_rows()[0], np.zeros(240))},
            "validation: labels holds no positives in 240 rows; an AUC needs both classes: add some positives",
        ),
    ],
)
def test_what_is_no_member_or_part_is_said_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        fit(nn.Linear(4, 1), make_clients(), **({"cycles": 1} | settings))
    assert str(caught.value) == message


@pytest.mark.parametrize("metrics", ["pauc@0.2, auc", ["pauc@0.2", AUC()], (PartialAUC(0.2), "auc")])
def test_metrics_may_be_a_text_or_a_list(metrics: Any) -> None:
    fitted = fit(nn.Linear(4, 1), make_clients(), test=make_rows(100), groups=3, cycles=1, metrics=metrics)
    assert list(fitted.history[0][1]) == ["pauc@0.2", "auc", "low", "high"]


@pytest.mark.parametrize("callbacks", ["progress-line", ProgressLine(), ["progress-line"]])
def test_callbacks_may_be_a_text_or_one_or_a_list(callbacks: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fit(nn.Linear(4, 1), make_clients(), test=make_rows(100), groups=3, cycles=1, metrics=AUC(), callbacks=callbacks)
    assert capsys.readouterr().err.startswith("round 6 of 6: auc ")


@pytest.mark.parametrize(("names", "unknown"), [(None, 100), (np.arange(100) % 20, 40), (np.arange(100) % 12, 0)])
def test_rows_of_unknown_clients_are_reported_once(
    names: np.ndarray | None, unknown: int, caplog: pytest.LogCaptureFixture
) -> None:
    """There are twelve clients; rows of others are scored with the initial head."""
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    test = examples(*make_rows(100), names)
    fit(module, make_clients(), "cycp-fedavg", test=test, groups=3, cycles=2, wrappers="personal-head")
    message = f"{unknown} of the 100 test rows name no training client; they are scored with the initial head"
    assert [record.getMessage() for record in caplog.records] == [message] * (unknown > 0)


def test_a_dead_scorer_is_noticed_without_test_rows() -> None:
    recipe = Recipe.of(
        "cycp-pairwise", objective=PairwiseSigmoid(score="sigmoid"), learning_rate=1e8, groups=3, cycles=3
    )
    with pytest.raises(TrainingStopped, match="the scorer is dead"):
        fit(nn.Linear(4, 1), make_clients(), recipe)


def test_settings_beside_a_whole_recipe_are_refused() -> None:
    with pytest.raises(ValueError, match="come with a whole recipe"):
        fit(nn.Linear(4, 1), make_clients(), Recipe.of("fedavg"), cycles=3)


def test_numpy_integers_are_whole_numbers() -> None:
    assert Recipe.of("fedavg", cycles=np.int64(3)).cycles == 3
    assert type(Recipe.of("fedavg", seed=np.int64(3)).seed) is int


def test_an_index_buffer_survives_half_precision() -> None:
    """999 is not a bfloat16 number; a buffer that holds it must come back whole."""

    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("index", torch.tensor([999]))
            self.table, self.score = nn.Embedding(1000, 4), nn.Linear(4, 1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.score(inputs + self.table(self.index))
            return scores

    fitted = fit(Indexed(), make_clients(), "cycp-fedavg", groups=3, cycles=1, dtype="bfloat16")
    assert fitted.module.get_buffer("index").tolist() == [999]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "verbose", "is_heard"),
    [(Terminal, None, True), (io.StringIO, None, False), (io.StringIO, True, True), (Terminal, False, False)],
)
def test_fit_reports_progress_where_somebody_reads_it(
    stream: type[io.StringIO], verbose: bool | None, is_heard: bool
) -> None:
    with redirect_stderr(stream()) as heard:
        fit(nn.Linear(4, 1), make_clients(), test=make_rows(100), groups=3, cycles=1, verbose=verbose)
    lines = heard.getvalue().splitlines()
    assert bool(lines) == is_heard
    if is_heard:
        assert lines[0] == "12 sites are simulated in this process, with all rows in one place, in 3 groups at random"
        assert lines[1].startswith("3 of the 6 rounds of cycp-pairwise only collect scores")
        assert lines[3] == "cycp-pairwise: 6 rounds"
        assert lines[-1].startswith("cycp-pairwise: done, round 6 of 6, test AUC ")


@pytest.mark.parametrize(
    ("weighting", "largest", "said"), [("pooled", 2000, 1), ("pooled", 40, 0), ("clients", 2000, 0)]
)
def test_a_run_says_that_one_site_has_most_of_the_rows(
    weighting: str, largest: int, said: int, capsys: pytest.CaptureFixture[str]
) -> None:
    sites = np.repeat(np.arange(40), [largest, *[20] * 39])
    x, y = np.random.default_rng(0).normal(size=(len(sites), 2)), np.arange(len(sites)) % 4 == 0
    clients = Clients.from_arrays(x, y, client=sites)
    fit("linear", clients, "cycp-fedavg", cycles=1, groups=2, weighting=weighting, verbose=True)
    # 40 sites, of which one has 2000 of the 2780 rows: 40 * 2000 / 2780.
    assert capsys.readouterr().err.count("one site has 29 times the rows of a class") == said


def test_pooled_weighting_is_the_default_and_every_engine_trains_the_same_model_with_it() -> None:
    rng = np.random.default_rng(0)
    y = np.arange(120) % 3 == 0
    # Four sites of very different sizes, so that the weighting decides the model.
    sites = np.searchsorted([10, 25, 50], np.arange(120), side="right")
    table = Table({"x": rng.normal(size=120) + y, "y": y.astype(int), "client": sites})
    for method in ("cycp-fedavg", "cycp-minimax", "cycp-pairwise"):
        models = {}
        for engine, weighting in (("loop", None), ("batched", None), ("loop", "clients")):
            settings: dict[str, Any] = {} if weighting is None else {"weighting": weighting}
            fitted = fit("linear", table, method, cycles=2, groups=2, engine=engine, dtype="float64", **settings)
            assert fitted.recipe.weighting == (weighting or "pooled")
            models[engine, weighting] = fitted.scores(np.linspace(-2, 2, 9)[:, None])
        np.testing.assert_allclose(models["loop", None], models["batched", None], rtol=1e-9)
        assert np.abs(models["loop", None] - models["loop", "clients"]).max() > 1e-3
