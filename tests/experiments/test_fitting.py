"""`fit`: arrays in, a trained module out, and clear errors when something does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedauc import Clients, Recipe, TrainingStopped, examples, fit
from fedauc.objectives.contrastive import Contrastive
from fedauc.objectives.sigmoid import PairwiseSigmoid
from fedauc.objectives.squared_hinge import SquaredHinge
from fedauc.participation.uniform import Uniform
from fedauc.stages import Geometric


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
        (nn.Linear(4, 1), {"learning_rate": "big"}, "learning_rate is 'big'; it must be a finite number above 0"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_what_does_not_fit_is_said_in_one_line(module: nn.Module, settings: dict[str, Any], message: str) -> None:
    groups: dict[str, Any] = {} if "participation" in settings else {"groups": 3}
    with pytest.raises(ValueError, match=message) as caught:
        fit(module, make_clients(), "cycp-pairwise", **groups, **settings)
    assert "\n" not in str(caught.value)


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
