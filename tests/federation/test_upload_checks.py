"""Uploads are compared with what the fleet has sent, whatever the cohort; honest ones pass, and a resume agrees."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from fedauc.experiments.folder import RunFolder
from fedauc.federation.exchange import AnswerRefused
from fedauc.federation.upload_checks import (
    HISTORY_CYCLES,
    UploadHistory,
    UploadMeasures,
    check_histograms,
    measure_upload,
)
from fedauc.interfaces import BatchSize, Model, Phase, ScoreHistogram, Upload
from fedauc.objectives.kinds import Passive
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.trace import Trace
from fedauc.training import Round
from fedauc.transforms.client_dp import ClientDP
from fedauc.transforms.clip import Clip
from fedauc.transforms.quantize import Quantize
from fedauc.transforms.robust_means import Krum, Median, TrimmedMean
from federation.memory_grid import collect_rounds, create_run, make_agreement, make_grid, make_policy, resume_run
from federation.misbehaving_sites import (
    Change,
    Trees,
    make_misbehaving_grid,
    scale_update,
    shift_scores,
)
from federation.test_faults import METHODS, make_trace
from small_federations import run_rounds, same_bits, small_recipe


def make_phase(round: int, learning_rate: float = 0.1, scoring: bool = False) -> Phase:
    return Phase(round, 0, 0, learning_rate, 2, BatchSize(2, 3), scoring=scoring)


def fill_history(norms: dict[int, list[float]], learning_rate: float = 0.1) -> UploadHistory:
    """The history of a fleet: norms by client, one per round."""
    history = UploadHistory()
    for round in range(max(map(len, norms.values()))):
        sent = {client: UploadMeasures(values[round]) for client, values in norms.items() if round < len(values)}
        history = history.add_uploads(make_phase(round, learning_rate), sent, cycle_length=3)
    return history


def is_refused(history: UploadHistory, measures: UploadMeasures, phase: Phase, **policy: Any) -> bool:
    try:
        history.check_upload(measures, phase, make_policy(**policy))
    except AnswerRefused:
        return True
    return False


# --------------------------------------------------------------------------------------------------------- the bounds


def test_the_bound_of_a_norm_is_the_equation() -> None:
    """limit · e^σ · median over sites of their largest norm, by plain Python."""
    norms = {0: [1.0, 3.0], 1: [2.0], 2: [0.5, 0.4, 0.1], 5: [8.0]}
    history = fill_history(norms)
    largest = [max(values) for values in norms.values()]  # 3, 2, 0.5, 8
    middle = median(largest)  # 2.5
    sigma = 1.4826 * median(abs(math.log(value / middle)) for value in largest)
    bound = 20 * math.exp(sigma) * middle
    assert not is_refused(history, UploadMeasures(bound * 0.999), make_phase(3))
    assert is_refused(history, UploadMeasures(bound * 1.001), make_phase(3))
    assert not is_refused(history, UploadMeasures(bound * 1.001), make_phase(3), history_limit=21)


def test_a_site_counts_once_however_often_it_comes() -> None:
    """A median over uploads would be the busy site's 1000."""
    history = fill_history({0: [1000.0] * 6, 1: [1.0], 2: [1.0]})
    assert is_refused(history, UploadMeasures(100.0), make_phase(6))


def test_two_sites_say_nothing() -> None:
    assert not is_refused(fill_history({0: [1.0], 1: [1.0]}), UploadMeasures(1e9), make_phase(1))
    assert is_refused(fill_history({0: [1.0], 1: [1.0], 2: [1.0]}), UploadMeasures(1e9), make_phase(1))


def test_longer_visits_may_send_more() -> None:
    """Ten times the learning rate scales earlier norms by ten; a tenth of it scales nothing."""
    history = fill_history({0: [1.0], 1: [1.0], 2: [1.0]})
    assert is_refused(history, UploadMeasures(150.0), make_phase(1, learning_rate=0.1))
    assert not is_refused(history, UploadMeasures(150.0), make_phase(1, learning_rate=1.0))
    assert not is_refused(history, UploadMeasures(19.0), make_phase(1, learning_rate=0.01))


def test_old_cycles_are_forgotten() -> None:
    history = fill_history({0: [1.0], 1: [1.0], 2: [1.0]})
    later = history.add_uploads(make_phase(HISTORY_CYCLES * 3), {0: UploadMeasures(5.0)}, cycle_length=3)
    assert later.rounds.tolist() == [HISTORY_CYCLES * 3]
    earlier = history.add_uploads(make_phase(HISTORY_CYCLES * 3 - 1), {0: UploadMeasures(5.0)}, cycle_length=3)
    assert earlier.clients.tolist() == [0, 1, 2, 0]


def test_the_bound_of_scores_is_the_equation() -> None:
    """L and H are medians of the sites' smallest and largest scores; the range may be left by 100 times its width."""
    ranges = {0: (-1.0, 2.0), 1: (0.0, 1.0), 2: (-3.0, 5.0)}
    sent = {client: UploadMeasures(1.0, *bounds) for client, bounds in ranges.items()}
    history = UploadHistory().add_uploads(make_phase(0), sent, cycle_length=3)
    low, high = -1.0, 2.0
    slack = 100 * (high - low)
    assert not is_refused(history, UploadMeasures(1.0, low - slack, high + slack), make_phase(1))
    assert is_refused(history, UploadMeasures(1.0, low - slack - 1, high), make_phase(1))
    assert is_refused(history, UploadMeasures(1.0, low, high + slack + 1), make_phase(1))
    assert not is_refused(history, UploadMeasures(1.0, low, high + slack + 1), make_phase(1), score_limit=101)


def test_scores_of_scoring_rounds_are_compared_with_one_another() -> None:
    """Before the first step scores lie close together; a model that has learned for a cycle spreads them."""
    nan = math.nan
    sent = {client: UploadMeasures(nan, -0.01, 0.01) for client in range(3)}
    history = UploadHistory().add_uploads(make_phase(0, scoring=True), sent, cycle_length=3)
    assert is_refused(history, UploadMeasures(nan, -50.0, 50.0), make_phase(1, scoring=True))
    assert not is_refused(history, UploadMeasures(1.0, -50.0, 50.0), make_phase(1))


def test_the_narrow_range_of_a_model_that_has_just_begun_is_no_bound() -> None:
    """After one local step all scores are nearly equal; a few steps later honest ones lie 300 such ranges beyond."""
    sent = {client: UploadMeasures(1.0, 0.0, 0.0009) for client in range(3)}
    history = UploadHistory().add_uploads(make_phase(0), sent, cycle_length=3)
    assert not is_refused(history, UploadMeasures(1.0, 0.04, 0.27), make_phase(1))
    assert not is_refused(history, UploadMeasures(1.0, -9.9, 9.9), make_phase(1))
    assert is_refused(history, UploadMeasures(1.0, 0.0, 10.1), make_phase(1))  # 100 times 0.1, and 0.0009


def test_measures_leave_histograms_and_estimates_out() -> None:
    change = Model(torch.tensor([3.0, 4.0]), torch.zeros(0))
    histogram = ScoreHistogram(torch.full((2, 8), 100.0), torch.zeros(2))
    assert measure_upload(Upload((change, histogram)), False).norm == 5.0
    # A positive travels as its score, two estimates, and whether they are known.
    anchors = torch.tensor([[[0.5, 700.0, 900.0, 1.0]]])
    measures = measure_upload(Upload((), Passive(anchors, torch.tensor([[-2.0, 0.25]]))), False)
    assert math.isnan(measures.norm)
    assert (measures.low, measures.high) == (-2.0, 0.5)
    embedded = measure_upload(Upload((), Passive(anchors, anchors)), True)
    assert math.isnan(embedded.low)


@pytest.mark.parametrize(
    ("masses", "ends", "is_exact", "reason"),
    [
        ([[0.5, 1.5], [0.25, 0.25]], 0.0, True, None),
        ([[0.5, 0.5], [0.25, 0.25]], 0.0, True, "mass 1; its weight in the loss is 2"),
        ([[0.5, 0.5], [0.25, 0.25]], 0.0, False, None),
        ([[0.5, 1.6], [0.25, 0.25]], 0.0, False, "mass 2.1; its weight in the loss is 2"),
        ([[-0.5, 2.5], [0.25, 0.25]], 0.0, True, "negative masses"),
        ([[0.5, 1.5], [0.25, 0.25]], 1.0, True, "changes the ends"),
        ([[0.5, 1.5], [2.5, 0.25]], 0.0, True, "histogram of negatives has mass 2.75; its weight in the loss is 0.5"),
    ],
)
def test_masses_sum_up_to_the_weight(
    masses: list[list[float]], ends: float, is_exact: bool, reason: str | None
) -> None:
    upload = Upload(
        (Model(torch.zeros(2), torch.zeros(0)), ScoreHistogram(torch.tensor(masses), torch.tensor([ends] * 2)))
    )
    if reason is None:
        check_histograms(upload, (2.0, 0.5), is_exact)
        return
    with pytest.raises(AnswerRefused, match=reason):
        check_histograms(upload, (2.0, 0.5), is_exact)


# ---------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("method", METHODS)
def test_honest_sites_are_never_refused(method: str, tmp_path: Path) -> None:
    """A method of every kind, with stages and with scoring rounds; the bits are the simulator's, see test_faults.py.

    The cohort's own median is left out: with sites of one class, honest updates are many times larger than others.
    """
    agreement = make_agreement(method, {"evaluation": "none", "norm_limit": 1e9}, cycles=3, **METHODS[method])
    create_run(agreement, make_grid(tmp_path / "sites"), tmp_path / "run").train_to_end()
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    assert not any(line["refused"] for line in lines)
    assert sum(len(line["answered"]) for line in lines) >= 21


HONEST: dict[str, dict[str, Any]] = {
    "histograms": {"pool": "histogram"},
    "histograms, clients weighting": {"pool": "histogram", "weighting": "clients"},
    "clipped histograms": {"pool": "histogram", "transforms": (Clip(norm=0.05),)},
    "private histograms": {"pool": "histogram", "transforms": (ClientDP(noise_multiplier=0.5),)},
    "codes of histograms": {"pool": "histogram", "transforms": (Quantize(bits=4),)},
    "codes": {"transforms": (Quantize(bits=4),)},
}


@pytest.mark.parametrize("case", HONEST)
def test_honest_histograms_are_never_refused(case: str, tmp_path: Path) -> None:
    agreement = make_agreement("cycp-pairwise", {"evaluation": "none"}, cycles=4, **HONEST[case])
    create_run(agreement, make_grid(tmp_path / "sites"), tmp_path / "run").train_to_end()
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    assert not any(line["refused"] for line in lines)


def poison_masses(factor: float) -> Change:
    """Send a multiple of the masses of one's histogram; the model's change stays."""

    def change(header: dict[str, Any], trees: Trees) -> None:
        trees["mean"] = tuple(factor * leaf if leaf.ndim == 2 else leaf for leaf in trees["mean"])

    return change


POISONED: dict[str, tuple[Change, dict[str, Any], str]] = {
    "a huge update": (scale_update(1e6), {}, "its update has norm"),
    "scores far away": (shift_scores(1e4), {}, "its scores lie between"),
    "scores far below": (shift_scores(-1e4), {}, "its scores lie between"),
    "a heavy histogram": (poison_masses(50), {"pool": "histogram"}, "its histogram of positives has mass"),
    "a negative histogram": (poison_masses(-1), {"pool": "histogram"}, "negative masses"),
}


@pytest.mark.parametrize("case", POISONED)
def test_a_poisoned_answer_in_a_cohort_of_two_is_an_absence(case: str, tmp_path: Path) -> None:
    """Site 4 and one other form a cohort, which the cohort's median does not protect. Round 7 is in the third cycle."""
    change, settings, reason = POISONED[case]
    grid = make_misbehaving_grid(tmp_path / "sites", {4: change}, rounds=[7])
    agreement = make_agreement("cycp-pairwise", {"evaluation": "none"}, cycles=4, participation=Cyclic(), **settings)
    rounds: list[Round] = []
    collect_rounds(create_run(agreement, grid, tmp_path / "run"), rounds)
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    assert lines[7]["refused"].keys() == {"site-4"}
    assert reason in lines[7]["refused"]["site-4"]
    assert sum(len(line["refused"]) for line in lines) == 1
    trace = make_trace(len(rounds), {(7, 4)})
    expected = run_rounds(small_recipe("cycp-pairwise", engine="loop", cycles=4, participation=trace, **settings))
    assert same_bits(rounds[-1].state.server.shared, expected[-1].state.server.shared)


def test_a_resumed_run_refuses_what_an_uninterrupted_one_refuses(tmp_path: Path) -> None:
    """The history is in the checkpoint: without it the first rounds after a resume would have no bound."""
    agreement = make_agreement("cycp-pairwise", {"evaluation": "none"}, cycles=4)
    grid = make_misbehaving_grid(tmp_path / "sites", {4: scale_update(1e6)}, rounds=[7])
    run = create_run(agreement, grid, tmp_path / "run")

    class Killed(Exception):
        pass

    def kill_server(finished: Round) -> None:
        if finished.phase.round == 6:
            raise Killed

    with pytest.raises(Killed):
        collect_rounds(run, [], after_round=kill_server)
    resume_run(agreement, grid, tmp_path / "run").train_to_end()
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    assert list(lines[7]["refused"]) == ["site-4"]


def test_in_a_private_run_nobody_is_compared_with_others(tmp_path: Path) -> None:
    """Uploads are clipped at the sites; whether one is used must not depend on what others have sent."""
    grid = make_misbehaving_grid(tmp_path / "sites", {4: scale_update(1e6)}, rounds=[7])
    private = {"transforms": (ClientDP(noise_multiplier=0.5),), "weighting": "paper"}
    agreement = make_agreement("cycp-fedavg", {"evaluation": "none"}, cycles=4, **private)
    run = create_run(agreement, grid, tmp_path / "run")
    rounds: list[Round] = []
    collect_rounds(run, rounds)
    assert not any(line["refused"] for line in RunFolder(tmp_path / "run").read_lines("attendance.jsonl"))
    assert run._engine.checks is not None
    assert len(run._engine.checks.history.rounds) == 0


ROBUST = {"median": Median(), "trimmed": TrimmedMean(trim=0.34), "krum": Krum(wrong=1)}


def train_weights(folder: Path, mean: Any, changes: dict[int, Change]) -> torch.Tensor:
    """The weights after rounds in which all sites come and none is refused."""
    policy = {"evaluation": "none", "norm_limit": 1e9, "history_limit": 1e9}
    settings = {"mean": mean, "cycles": 4, "participation": "full", "learning_rate": 0.3, "weighting": "clients"}
    rounds: list[Round] = []
    grid = make_misbehaving_grid(folder / "sites", changes)
    collect_rounds(create_run(make_agreement("cycp-fedavg", policy, **settings), grid, folder / "run"), rounds)
    assert all(finished.cohort.clients == (0, 1, 3, 4, 5, 6, 7) for finished in rounds)
    weights: torch.Tensor = rounds[-1].state.server.shared.weights
    return weights


@pytest.fixture(scope="module")
def moved_by_one_site(tmp_path_factory: pytest.TempPathFactory) -> float:
    """How far a site that sends -15 times its update moves the model under the plain mean."""
    folder = tmp_path_factory.mktemp("weighted")
    honest, poisoned = (
        train_weights(folder / name, "weighted", changes)
        for name, changes in (("honest", {}), ("poisoned", {6: scale_update(-15)}))
    )
    return float((honest - poisoned).norm())


@pytest.mark.parametrize("name", ROBUST)
def test_robust_means_hold_a_poisoned_site_off(name: str, moved_by_one_site: float, tmp_path: Path) -> None:
    honest = train_weights(tmp_path / "honest", ROBUST[name], {})
    poisoned = train_weights(tmp_path / "poisoned", ROBUST[name], {6: scale_update(-15)})
    assert float((honest - poisoned).norm()) < moved_by_one_site / 3


@pytest.mark.parametrize("name", ROBUST)
def test_a_robust_mean_of_the_sites_that_answered_is_the_simulators(name: str, tmp_path: Path) -> None:
    rows = tuple((round, client) for round in range(4) for client in (0, 1, 3, 4, 5, 6, 7) if (round, client) != (2, 4))
    everybody = Cyclic(given=((0, 1, 3, 4, 5, 6, 7),), assignment="given")
    settings: dict[str, Any] = {"mean": ROBUST[name], "cycles": 4}
    agreement = make_agreement("cycp-fedavg", {"evaluation": "none"}, participation=everybody, **settings)
    grid = make_misbehaving_grid(tmp_path / "sites", {4: scale_update(math.nan)}, rounds=[2])
    rounds: list[Round] = []
    collect_rounds(create_run(agreement, grid, tmp_path / "run"), rounds)
    trace = Trace(rows=rows, schedule=everybody)
    expected = run_rounds(small_recipe("cycp-fedavg", engine="loop", participation=trace, **settings))
    assert [finished.cohort.absent for finished in rounds] == [finished.cohort.absent for finished in expected]
    assert rounds[2].cohort.absent == (4,)
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)
    assert np.isfinite(float(rounds[-1].state.server.shared.weights.norm()))
