"""A run that cannot go on stops, and says in which round, what happened and what to try."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedauc.algorithms import find_algorithms
from fedauc.algorithms.minimax import starting_point
from fedauc.experiments.assembly import assemble_training
from fedauc.experiments.fitting import fit
from fedauc.guards import DUAL_LIMIT, SCORE_LIMIT, Advice, DivergenceMonitor, TrainingStopped, check_scores
from fedauc.interfaces import Algorithm, BatchSize, Model, Phase
from fedauc.objectives.contrastive import Contrastive
from fedauc.objectives.logistic import Logistic
from fedauc.objectives.minimax import Minimax
from fedauc.objectives.sigmoid import PairwiseSigmoid
from fedauc.objectives.square import PairwiseSquare
from fedauc.server_optimizers.momentum import Momentum
from fedauc.trees import Tree
from small_federations import FEATURES, assemble_small, held_out, linear_scorer, small_federation, small_recipe

PHASE = Phase(round=17, cycle=5, stage=2, learning_rate=0.1, local_steps=1, batch=BatchSize(1, 1))


def algorithm(name: str, objective: object) -> Algorithm:
    kind: type[Algorithm] = find_algorithms()[name]
    return kind(objective=objective)  # type: ignore[arg-type]


FEDAVG = algorithm("fedavg", Logistic())
RAW = algorithm("minimax", Minimax(score="identity"))
BOUNDED = algorithm("minimax", Minimax(score="sigmoid"))


# -------------------------------------------------------------------------------------------------------- whole runs


def test_a_run_that_blows_up_stops_with_round_cause_and_remedy() -> None:
    # The squared surrogate's curvature is of order 1, so a step of 1e6 multiplies the weights by 1e6 each step.
    # In float32 they overflow within a visit, before any scores are evaluated.
    settings = {"objective": PairwiseSquare(), "learning_rate": 1e6, "cycles": 50, "dtype": "float32", "local_steps": 8}
    with pytest.raises(TrainingStopped) as caught:
        fit(linear_scorer(), small_federation(), small_recipe("cycp-pairwise", **settings))
    message = str(caught.value)
    assert message.startswith("stopped in round ")
    assert "of the 5 trained values are NaN or infinite" in message
    assert "try a smaller learning rate (now 1e+06, say 100000)" in message
    assert "\n" not in message


def test_a_diverging_dual_stops_before_it_overflows() -> None:
    recipe = small_recipe("cycp-minimax", objective=Minimax(score="identity"), learning_rate=1.5, cycles=50)
    with pytest.raises(TrainingStopped) as caught:
        fit(linear_scorer(), small_federation(), recipe)
    message = str(caught.value)
    assert "the dual alpha is " in message
    assert "beyond 1000: it diverges" in message
    assert "score='sigmoid'" in message
    assert "stopped in round " in message


def test_a_dead_scorer_stops_at_the_first_evaluation() -> None:
    # A rectifier far below zero: every score is 0 and so is every gradient.
    module = nn.Sequential(linear_scorer(), nn.ReLU())
    with torch.no_grad():
        module[0].bias.fill_(-100)  # type: ignore[operator]
    with pytest.raises(TrainingStopped) as caught:
        fit(module, small_federation(), small_recipe("cycp-pairwise"), test=held_out())
    message = str(caught.value)
    # The scoring cycle has rounds 0 to 2, so the first learning cycle ends with round 5.
    assert message.startswith("stopped in round 5 (cycle 1, stage 0): the scorer is dead: ")
    assert "all 200 evaluation scores equal 0" in message
    assert "try a smaller learning rate (now 0.1, say 0.01), another initialisation" in message


@pytest.mark.parametrize("method", ["cycp-pairwise", "cycp-fedavg"])
@pytest.mark.parametrize("has_test_rows", [False, True])
def test_an_enormous_learning_rate_stops_where_the_loss_saturates(method: str, has_test_rows: bool) -> None:
    """Both losses have bounded slopes, so that one step of 1e30 gives finite scores and no further gradient."""
    recipe, test = small_recipe(method, learning_rate=1e30), held_out() if has_test_rows else None
    with pytest.raises(TrainingStopped, match="half of the evaluation scores are at least") as stop:
        fit(linear_scorer(), small_federation(), recipe, test=test)
    assert "try a smaller learning rate (now 1e+30" in str(stop.value)


def test_the_rounds_before_the_stop_were_handed_out() -> None:
    rounds: list[int] = []
    recipe = small_recipe("cycp-pairwise", objective=PairwiseSquare(), learning_rate=1e6, cycles=50)
    training, _, start = assemble_small(recipe)
    with pytest.raises(TrainingStopped) as caught:
        rounds.extend(finished.phase.round for finished in training.rounds(start))
    assert rounds == list(range(len(rounds)))
    assert f"stopped in round {len(rounds)} " in str(caught.value)


# --------------------------------------------------------------------------------------------------------- the checks


def shared(*values: float) -> Model:
    return Model(torch.tensor(values), torch.tensor([-math.inf]))


def point(*values: float) -> Tree:
    return starting_point(shared(*values), Minimax())


def check_round(algorithm: Algorithm, phase: Phase, shared: Tree, diagnostics: dict[str, float]) -> None:
    DivergenceMonitor(algorithm).check_round(
        phase, shared, {name: torch.tensor(value) for name, value in diagnostics.items()}
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_enough(value: float) -> None:
    with pytest.raises(TrainingStopped, match=r"round 17 \(cycle 5, stage 2\): 1 of the 3 trained values"):
        check_round(FEDAVG, PHASE, shared(1.0, value, 2.0), {})
    # The sum of two of these overflows float32; each of them does not.
    check_round(FEDAVG, PHASE, shared(3e38, 3e38, 2.0), {})


def test_a_buffer_may_hold_a_mask_of_infinities() -> None:
    check_round(FEDAVG, PHASE, shared(1.0), {})


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_dual_may_reach_its_limit_and_not_pass_it(sign: int) -> None:
    check_round(RAW, PHASE, point(1.0), {"alpha": sign * DUAL_LIMIT})
    with pytest.raises(TrainingStopped, match="the dual alpha is"):
        check_round(RAW, PHASE, point(1.0), {"alpha": sign * DUAL_LIMIT * 1.01})


def test_a_dual_that_is_not_finite_is_reported_as_such() -> None:
    with pytest.raises(TrainingStopped, match="2 of the 2 trained values are NaN"):
        check_round(RAW, PHASE, point(math.nan), {"alpha": math.nan})


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [(RAW, "or score='sigmoid'"), (BOUNDED, "another initialisation"), (FEDAVG, "another initialisation")],
    ids=["raw", "bounded", "fedavg"],
)
def test_the_remedy_fits_the_algorithm(kind: Algorithm, remedy: str) -> None:
    with pytest.raises(TrainingStopped, match=f"smaller learning rate .now 0.1, say 0.01.*{remedy}"):
        check_round(kind, PHASE, (shared if kind is FEDAVG else point)(math.nan), {})


def test_the_remedy_names_the_values_of_options() -> None:
    """The rate is the option's, not that of a later stage, and nothing is advised that is set already."""
    wrong = torch.tensor([math.nan, 1.0])
    with pytest.raises(TrainingStopped) as caught:
        check_scores(FEDAVG, PHASE, wrong, Advice(1.0, "clients", 0.5))
    assert str(caught.value).endswith(
        "try a smaller learning rate (now 1, say 0.1; this stage trains with 0.1), a smaller server learning rate "
        "(now 0.5, say 0.05), another initialisation, or inputs on a smaller scale"
    )
    with pytest.raises(
        TrainingStopped, match=r"\(now 0.1, say 0.01\), another initialisation, or weighting='clients'$"
    ):
        check_scores(FEDAVG, PHASE, wrong, Advice(0.1, "positives"))


def test_a_run_hands_its_options_to_the_advice() -> None:
    recipe = small_recipe("cycp-pairwise", learning_rate=1e30, server_optimizer=Momentum(learning_rate=0.25))
    with pytest.raises(TrainingStopped, match=r"server learning rate \(now 0.25, say 0.025\)"):
        fit(linear_scorer(), small_federation(), recipe, test=held_out())


def test_scores_that_only_saturate_are_dead_where_the_link_squashes_them() -> None:
    # In float32 the sigmoid of 100 and of 200 is 1, while the raw outputs still rank.
    outputs = torch.tensor([100.0, 200.0])
    with pytest.raises(TrainingStopped, match="all 2 evaluation scores equal 1; "):
        check_scores(BOUNDED, PHASE, outputs)
    check_scores(RAW, PHASE, outputs)


def test_one_different_score_keeps_a_scorer_alive() -> None:
    check_scores(algorithm("pairwise", PairwiseSigmoid()), PHASE, torch.tensor([0.0, 0.0, 1e-30]))


def test_scores_that_are_not_finite_are_counted() -> None:
    with pytest.raises(TrainingStopped, match="2 of 3 evaluation scores are NaN or infinite"):
        check_scores(FEDAVG, PHASE, torch.tensor([0.0, math.nan, math.inf]))


def test_embeddings_are_dead_when_all_rows_agree() -> None:
    metric = algorithm("pairwise", Contrastive())
    with pytest.raises(TrainingStopped, match="all 3 evaluation scores equal"):
        check_scores(metric, PHASE, torch.tensor([1.0, 2.0]).expand(3, 2))
    check_scores(metric, PHASE, torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 3.0]]))


def test_a_healthy_run_is_not_stopped() -> None:
    fitted = fit(linear_scorer(), small_federation(), small_recipe("cycp-minimax"), test=held_out())
    assert len(fitted.history) == 2
    assert fitted.module.get_parameter("weight").shape == (1, FEATURES)


def test_half_of_the_scores_may_be_large_and_not_more() -> None:
    """The median of an even count is the lower of the middle two: one outlying row stops nothing."""
    check_scores(FEDAVG, PHASE, torch.tensor([0.0, 1.0, 1e20, 1e20]))
    check_scores(FEDAVG, PHASE, torch.tensor([0.0, SCORE_LIMIT, SCORE_LIMIT]))
    with pytest.raises(TrainingStopped, match="they diverge"):
        check_scores(FEDAVG, PHASE, torch.tensor([0.0, -2 * SCORE_LIMIT, 2 * SCORE_LIMIT]))


def test_inputs_of_unit_size_are_not_to_be_scaled_down_further() -> None:
    """What is advised last is something that the run does not do already."""
    wrong = torch.tensor([math.nan, 1.0])
    several_steps = PHASE._replace(local_steps=8)
    scaled = Advice(0.1, "clients", has_scaled_inputs=True)
    with pytest.raises(TrainingStopped, match=r"another initialisation, or fewer local steps \(now 8, say 2\)$"):
        check_scores(FEDAVG, several_steps, wrong, scaled)
    with pytest.raises(TrainingStopped, match=r"or more rows per local step \(now 1 positives and 1 negatives\)$"):
        check_scores(FEDAVG, PHASE, wrong, scaled)
    clients = small_federation()
    assert assemble_training(small_recipe("cycp-fedavg"), linear_scorer(), clients).training.advice.has_scaled_inputs
    large = replace(clients, inputs=clients.inputs * 1e4)
    assert not assemble_training(small_recipe("cycp-fedavg"), linear_scorer(), large).training.advice.has_scaled_inputs
