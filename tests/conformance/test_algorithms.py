"""Every method of the literature, on every engine, keeps the promises of `interfaces.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedauc.algorithms import find_algorithms, find_methods
from fedauc.algorithms.one_vs_rest import OneVsRestPairwise
from fedauc.data.weighting import WEIGHTINGS
from fedauc.engines import engines
from fedauc.experiments.assembly import assemble_training
from fedauc.experiments.fitting import fit
from fedauc.experiments.recipe import Recipe
from fedauc.interfaces import Algorithm
from fedauc.metrics import auc
from fedauc.network import ModuleNetwork
from fedauc.objectives.contrastive import Contrastive
from fedauc.objectives.minimax import Minimax
from fedauc.objectives.squared_hinge import SquaredHinge
from fedauc.stages import StageOutput
from fedauc.testing._client_visits import LinearNetwork
from fedauc.testing._expectations import check_configuration, expect_close
from fedauc.testing._runs import (
    check_determinism,
    check_isolation,
    check_precision,
    check_resume,
    check_rounds,
    check_traffic,
)
from fedauc.testing.algorithm import (
    TWO_STAGES,
    check_arguments_unchanged,
    check_client_methods,
    check_empty_round,
    check_model_replacement,
    check_server_settings,
    check_tracing,
)
from small_federations import assemble_small, held_out, linear_scorer, small_federation, small_recipe

ENGINES = sorted(set(engines()) - {"compiled"})
"""Compiling takes seconds for every case; tests/engines/test_compiled.py has its own, fewer ones."""
OUTPUTS: tuple[StageOutput, ...] = ("last", "cycle_mean", "round_mean")

every_method = pytest.mark.parametrize("method", sorted(find_methods()))
every_engine = pytest.mark.parametrize("engine", ENGINES)


def test_every_algorithm_goes_by_a_method() -> None:
    # Tables of several classes come from Python alone, where the algorithm is given by itself.
    named = {method.algorithm for method in find_methods().values()}
    assert named | {OneVsRestPairwise} == set(find_algorithms().values())


# ---------------------------------------------------------------------------------------------------------- whole runs


@every_method
@every_engine
@pytest.mark.parametrize("weighting", sorted(WEIGHTINGS))
def test_runs_with_single_class_and_empty_clients(method: str, engine: str, weighting: str) -> None:
    check_rounds(small_recipe(method, engine=engine, weighting=weighting, **TWO_STAGES))


@every_method
@every_engine
def test_same_seed_same_bits_and_another_seed_other_bits(method: str, engine: str) -> None:
    check_determinism(small_recipe(method, engine=engine))


@every_method
@pytest.mark.parametrize("engine", ["loop", "auto"])
def test_leaves_its_inputs_and_every_global_generator_alone(method: str, engine: str) -> None:
    check_isolation(small_recipe(method, engine=engine))


@every_method
@every_engine
@pytest.mark.parametrize("stage_output", OUTPUTS)
def test_resumes_from_any_round_with_the_same_bits(method: str, engine: str, stage_output: StageOutput) -> None:
    check_resume(small_recipe(method, engine=engine, stage_output=stage_output, **TWO_STAGES))


def test_the_stops_above_cover_mid_cycle_scoring_and_stage_boundaries() -> None:
    training = assemble_small(small_recipe("cycp-pairwise", stage_output="round_mean", **TWO_STAGES)).training
    phases = [training.plan.phase(number) for number in range(training.plan.total_rounds)]
    # Scoring + 1 cycle, then scoring + 2 cycles, of K = 3 rounds: 15 rounds.
    assert len(phases) == 15
    assert [p.round for p in phases if p.starts_stage] == [0, 6]
    assert [p.round for p in phases if p.scoring] == [0, 1, 2, 6, 7, 8]
    assert sum(not p.ends_cycle for p in phases) == 10


@every_method
@every_engine
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("stage_output", ["last", "round_mean"])
def test_ledger_totals_equal_a_count_at_the_clients(method: str, engine: str, dtype: str, stage_output: str) -> None:
    settings: dict[str, Any] = {"prox": 0.1} if find_methods()[method].algorithm.name in ("minimax", "codasca") else {}
    check_traffic(small_recipe(method, engine=engine, dtype=dtype, stage_output=stage_output, **TWO_STAGES, **settings))


@every_method
@every_engine
def test_learns(method: str, engine: str) -> None:
    # Class means 3 apart in one feature: the best AUC is Phi(3 / sqrt 2) = 0.983. The start ranks by other features.
    test, module = held_out(separation=3.0), linear_scorer(bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[-0.1, 0.3, -0.3, 0.3]]))
    # A full-participation cycle is one round, so that it takes more cycles to do as many.
    cycles = 24 if find_methods()[method].participation == "full" else 8
    recipe = small_recipe(method, engine=engine, cycles=cycles, local_steps=8, positives=8, negatives=8)
    fitted = fit(module, small_federation(times=4, separation=3.0), recipe, test=test)
    labels = test.labels.numpy()
    initial = auc(labels, module(test.inputs).detach().numpy()[:, 0])
    curve = [quality.auc for _, quality in fitted.history]
    assert initial < 0.5
    assert curve[-1] > 0.9
    assert curve[-1] > curve[0] > initial
    assert curve[-1] == pytest.approx(auc(labels, fitted.scores(test.inputs)), abs=1e-12)


@every_method
@every_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_works_in_every_precision(method: str, engine: str, dtype: torch.dtype) -> None:
    check_precision(small_recipe(method, engine=engine, **TWO_STAGES), dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_fitted_model_scores_new_rows_in_every_precision(dtype: str) -> None:
    rows = held_out().inputs
    fitted = fit(linear_scorer(), small_federation(), small_recipe("fedavg", dtype=dtype))
    with torch.no_grad():
        expected = fitted.module(rows.to(next(fitted.module.parameters()).dtype))[:, 0].double().numpy()
    np.testing.assert_array_equal(fitted.scores(rows), expected)
    np.testing.assert_array_equal(fitted.scores(rows.numpy()), expected)


# -------------------------------------------------------------------------------------------------- client methods


def _list_cases() -> dict[str, Algorithm]:
    result = {name: m.algorithm(**dict(m.parameters), weight_decay=0.01) for name, m in find_methods().items()}
    kinds = find_algorithms()
    result["minimax-prox"] = kinds["minimax"](objective=Minimax(score="identity"), prox=0.3)  # type: ignore[call-arg]
    result["minimax-prior"] = kinds["minimax"](objective=Minimax(prior=0.2))
    result["codasca-prox"] = kinds["codasca"](objective=Minimax(), prox=0.3)  # type: ignore[call-arg]
    result["pairwise-hinge"] = kinds["pairwise"](objective=SquaredHinge(score="sigmoid"))
    result["pairwise-contrastive"] = kinds["pairwise"](objective=Contrastive())
    return result


CASES = _list_cases()
every_case = pytest.mark.parametrize("algorithm", CASES.values(), ids=CASES)


@every_case
def test_the_configuration_is_frozen_and_survives_json(algorithm: Algorithm) -> None:
    check_configuration(algorithm)


@every_case
def test_the_model_inside_the_shared_and_the_local_state_can_be_replaced(algorithm: Algorithm) -> None:
    check_model_replacement(algorithm)


@every_case
def test_the_client_methods_give_a_stacked_cohort_what_they_give_each_client(algorithm: Algorithm) -> None:
    check_client_methods(algorithm)


@every_case
@pytest.mark.parametrize("stacked", [False, True], ids=["one-client", "stacked"])
def test_step_can_be_traced_and_the_trace_gives_its_numbers(algorithm: Algorithm, stacked: bool) -> None:
    check_tracing(algorithm, stacked)


@every_case
def test_the_methods_do_not_change_their_arguments(algorithm: Algorithm) -> None:
    check_arguments_unchanged(algorithm)


@every_case
def test_a_round_that_nobody_comes_to_leaves_a_server_of_the_same_shape(algorithm: Algorithm) -> None:
    check_empty_round(algorithm)


@every_case
def test_the_clients_do_not_see_what_only_the_server_reads(algorithm: Algorithm) -> None:
    check_server_settings(algorithm)


def test_a_recipe_says_which_engines_there_are() -> None:
    with pytest.raises(ValueError, match="engine is 'nothing'; use 'auto', 'batched', 'compiled', 'graphed' or 'loop'"):
        Recipe.of("fedavg", engine="nothing")


def test_the_linear_network_above_is_the_module_network() -> None:
    module, rows = linear_scorer(bias=False), held_out().inputs[:5]
    network = ModuleNetwork(module)
    first, second = (
        network.forward_pass(network.initial_model(), rows),
        LinearNetwork().forward_pass(network.initial_model(), rows),
    )
    cotangent = torch.arange(5, dtype=torch.float64)
    actual, expected = ((forward.outputs, forward.pullback(cotangent)) for forward in (first, second))
    expect_close(actual, expected, "the two networks differ")


def test_assemble_needs_no_method_name() -> None:
    recipe = replace(small_recipe("fedavg"), method="my own")
    assert assemble_training(recipe, linear_scorer(), small_federation()).training.plan.total_rounds == 6
