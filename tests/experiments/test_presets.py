"""Presets: the settings of the paper by name, resolved in the configuration, with explicit options on top."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cli_helpers import fedauc
from fedauc import Clients, Config, Recipe, fit
from fedauc.algorithms import find_methods
from fedauc.experiments.assembly import assemble_training
from fedauc.experiments.options import build_config
from fedauc.experiments.presets import PRESETS, name_preset
from fedauc.objectives.minimax import Duals, Minimax
from fedauc.stages import Constant, Geometric, Milestones

PAPERS_METHODS = {
    "cycp-fedavg",
    "a-fedavg",
    "a-scaffold",
    "rs-minimax",
    "rs-pairwise",
    "cycp-minimax",
    "cycp-pairwise",
}
OPTIONS = {"preset": "as-printed"}


def make_clients() -> Clients:
    """12 clients of 20 rows, of which the first row of every client and of it alone is positive: a share of 1/20."""
    rng = np.random.default_rng(0)
    labels = np.arange(240) % 20 == 0
    return Clients.from_arrays(rng.normal(size=(240, 3)) + labels[:, None], labels, client=np.arange(240) // 20)


def test_the_paper_as_printed_has_its_seven_methods() -> None:
    assert set(PRESETS["as-printed"].settings) == PAPERS_METHODS <= set(find_methods())


@pytest.mark.parametrize("method", sorted(PAPERS_METHODS))
def test_a_preset_is_resolved_in_the_configuration(method: str) -> None:
    """Stagewise methods hand on the mean over rounds; the baselines end with their last model."""
    config = build_config(method, None, OPTIONS)
    recipe: Any = config.recipe
    assert recipe == Recipe.of(method, preset="as-printed")
    assert (recipe.cycles, recipe.weighting, recipe.positives, recipe.negatives) == (100, "paper", 16, 16)
    stagewise = "minimax" in method or "pairwise" in method
    assert recipe.stages == (Geometric(initial=10, decay=0.5, scale=2.0) if stagewise else Constant())
    assert recipe.stage_output == ("round_mean" if stagewise else "last")
    if "minimax" in method:
        assert (recipe.algorithm.prox, recipe.algorithm.objective) == (0.01, Minimax(prior_from_data=True))
    # The learning rate is one of the paper's grid.
    assert recipe.learning_rate in (0.1, 0.01, 0.001)
    text = config.to_json()
    assert "preset" not in text
    assert Config.from_json(text) == config
    assert name_preset(method, recipe) == "as-printed"
    assert name_preset(method, Recipe.of(method)) is None


def test_options_win_over_the_preset_and_the_preset_over_the_dataset() -> None:
    texts = {"stages.decay": "0.2", "weighting": "pooled", "objective.prior": "0.3", "cycles": "7"}
    recipe: Any = build_config("cycp-minimax", None, {**OPTIONS, **texts}).recipe
    assert recipe.stages == Geometric(initial=10, decay=0.2, scale=2.0)
    assert (recipe.weighting, recipe.cycles, recipe.algorithm.objective.prior) == ("pooled", 7, 0.3)
    assert name_preset("cycp-minimax", recipe) is None
    replaced = build_config("cycp-minimax", None, {**OPTIONS, "stages": "milestones"}).recipe
    assert (replaced.stages, replaced.stage_output) == (Milestones(), "round_mean")
    # Pooled weights are the default, which the preset replaces.
    table = {"data": "table", "data.path": "x.csv", "data.label": "y", "data.client": "site"}
    assert build_config("cycp-pairwise", None, table).recipe.weighting == "pooled"
    assert build_config("cycp-pairwise", None, {**table, **OPTIONS}).recipe.weighting == "paper"
    assert build_config("cycp-pairwise", None, {"preset": "none"}) == build_config("cycp-pairwise", None, {})


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown preset 'as-prnted': did you mean 'as-printed'"):
        Recipe.of("cycp-minimax", preset="as-prnted")
    with pytest.raises(ValueError, match="preset is 'as-printed', which has no settings for method 'fedxl1'; it has: "):
        Recipe.of("fedxl1", preset="as-printed")
    with pytest.raises(ValueError, match="preset is 'as-printed', but a configuration to start from has all settings"):
        build_config(None, build_config(None, None, {}), OPTIONS)
    private = Recipe.of("cycp-minimax", preset="as-printed", epsilon=3.0)
    with pytest.raises(ValueError, match="a private run does not release its share of positives; give a public"):
        assemble_training(private, nn.Linear(3, 1), make_clients())


def test_the_prior_is_the_share_of_positives_in_the_training_data() -> None:
    recipe = Recipe.of("cycp-minimax", preset="as-printed", groups=3)
    assembly = assemble_training(recipe, nn.Linear(3, 1), make_clients())
    objective: Any = assembly.training.algorithm.objective
    assert objective.prior == pytest.approx(1 / 20)
    assert objective.batch_kind == Minimax(prior_from_data=True).batch_kind == "rows"
    assert Minimax(prior=0.4, prior_from_data=True).with_prior(1, 9).prior == 0.4
    with pytest.raises(
        ValueError, match=r"the training data has 3 positives and 0 negatives; .* give prior as a number"
    ):
        Minimax(prior_from_data=True).with_prior(3, 0)
    with pytest.raises(ValueError, match="prior_from_data is true, but no data has been seen yet"):
        Minimax(prior_from_data=True).saddle_value(*_saddle_arguments())


def _saddle_arguments() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Duals]:
    scores, labels = torch.tensor([0.3, -0.2, 0.9, 0.1]).double(), torch.tensor([1.0, 0.0, 0.0, 1.0]).double()
    return scores, labels, torch.full((4,), 0.25).double(), Duals(*torch.tensor([0.2, -0.1, 0.4]).double())


def test_the_objective_is_the_printed_one() -> None:
    """F(w, a, b, α; z) of the paper's Eq. (2), averaged over a batch, in plain numpy."""
    scores, labels, weights, duals = _saddle_arguments()
    h, y, p = scores.numpy(), labels.numpy(), 3 / 10
    a, b, alpha = (float(dual) for dual in duals)
    printed = (1 - p) * (h - a) ** 2 * y + p * (h - b) ** 2 * (1 - y) - p * (1 - p) * alpha**2
    printed += 2 * (1 + alpha) * (p * h * (1 - y) - (1 - p) * h * y)
    objective = Minimax(prior_from_data=True).with_prior(3, 7)
    assert float(objective.saddle_value(scores, labels, weights, duals)) == pytest.approx(printed.mean())


def test_fit_takes_a_preset() -> None:
    clients = make_clients()
    settings: dict[str, Any] = {"cycles": 12, "groups": 3, "seed": 1}
    fitted = fit("linear", clients, "cycp-minimax", preset="as-printed", verbose=False, **settings)
    assert fitted.recipe == Recipe.of("cycp-minimax", preset="as-printed", **settings)
    # Two stages: 10 cycles, and 2 of the 20 that the second would have.
    assert fitted.state.round == 36


def test_the_command_line_lists_uses_and_shows_a_preset(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    listed = fedauc(capsys, "list", "presets")
    assert listed.code == 0
    assert listed.out.splitlines()[1].startswith("as-printed")
    words = ("--method", "cycp-minimax", "--cycles", "2", "--data", "synthetic", "--data.clients", "8", "--groups", "2")
    run = fedauc(capsys, "run", *words, "--preset", "as-printed", "--out", str(tmp_path / "run"))
    assert run.code == 0, run.err
    assert "the class prior is " in " ".join(run.err.split())
    assert "settings those of the preset as-printed" in " ".join(
        fedauc(capsys, "show", str(tmp_path / "run")).out.split()
    )
    assert json.loads(fedauc(capsys, "show", str(tmp_path / "run"), "--json").out)["preset"] == "as-printed"
    stored = json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]
    assert (stored["stages"]["name"], stored["algorithm"]["objective"]["prior_from_data"]) == ("geometric", True)
    refused = fedauc(capsys, "run", "--method", "coda-plus", "--preset", "as-printed", "--out", str(tmp_path / "x"))
    assert (refused.code, refused.err.count("\n")) == (2, 1)
