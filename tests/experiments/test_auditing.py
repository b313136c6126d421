"""The audit of whole runs: a correct one passes, planted faults in clip, noise and bands show, raw pools leak."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedauc.data.datasets.synthetic import Synthetic
from fedauc.experiments import canary_training
from fedauc.experiments.auditing import RunAudit, audit_run, choose_numbers, find_declared_noise
from fedauc.experiments.canary_training import CanaryClients, replay_rounds
from fedauc.experiments.config import Config
from fedauc.experiments.pool_audit import PoolRecorder, RecordedPairwise
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.run_loop import Progress
from fedauc.experiments.runner import DataCache, Run, assemble_run
from fedauc.interfaces import ServerRound, Upload
from fedauc.privacy.canaries import Canaries
from fedauc.random_tensors import KeyedNoise
from fedauc.reports.audits import describe_audit
from fedauc.transforms._client_noise import CHANGE_STREAM, NoisedClientDP
from fedauc.transforms.client_dp import ClientDP, list_change_leaves
from fedauc.trees import Tree
from fedauc.wrappers.example_dp import ExampleDP

DATA = Synthetic(clients=24, rows_per_client=40, features=39, positive_rate=0.25)
# A linear model of 39 features and a bias: 40 canaries.
DIMENSION, GROUPS, CYCLES = 40, 4, 8
PRIVATE: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-3}


def make_config(method: str = "cycp-fedavg", data: Synthetic = DATA, **settings: Any) -> Config:
    values = {"cycles": CYCLES, "groups": GROUPS, "local_steps": 2, "positives": 4, "negatives": 4, **settings}
    return Config(recipe=Recipe.of(method, **values), data=data)


def make_folder(path: Path, config: Config) -> Path:
    """A run folder before its first round, which is all that an audit needs."""
    return Run.create(config, path / "run").folder.path


def private_pairwise(**settings: Any) -> Config:
    return make_config("cycp-pairwise", pool="histogram", **PRIVATE, **settings)


# ------------------------------------------------------------------------------------------------- what canaries see


class KeptReleases:
    """Stands for the filter, and keeps what it is shown."""

    def __init__(self) -> None:
        self.rounds: list[np.ndarray] = []

    def observe_round(self, released: np.ndarray) -> None:
        self.rounds.append(released)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"transforms": (ClientDP(clip_quantile=0.5, clip_learning_rate=1.0),)},
        {"participation": "cyclic-poisson", "rate": 0.3},
    ],
    ids=["whole groups", "adaptive clip", "draws"],
)
def test_releases_are_the_canaries_and_the_runs_noise_and_nothing_else(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In numpy: B (x_t - Σ u_i) = σ z_t, where z_t is the keyed normal draw of the round."""
    # Three canaries at a time.
    monkeypatch.setattr(canary_training, "BLOCK_VALUES", 3 * DIMENSION)
    config = make_config(dtype="float64", **PRIVATE, **settings)
    _, (training, _, start) = assemble_run(config, DataCache())
    declared = find_declared_noise(training)
    assert declared is not None
    canaries = Canaries(5, 30, DIMENSION, GROUPS, declared.sampling, orthogonal=True)
    kept: Any = KeptReleases()
    joined = CanaryClients(canaries, kept, training.uploads, 77, first_number=24)
    clips = [
        float(replayed.finished.state.transforms[0].clip)
        for replayed in replay_rounds(replace(training, uploads=joined.uploads), start, None, joined)
    ]
    assert len(kept.rounds) == GROUPS * CYCLES == joined.releases
    # An adaptive norm must really have moved, for the units to be tested.
    assert (clips[-1] != ClientDP.clip) == ("transforms" in settings)
    is_in, directions = canaries.flip_coins(), canaries.draw_directions(0, 30).astype(np.float64)
    rests = np.stack(
        [
            release - (canaries.draw_attendance(number) & is_in) @ directions
            for number, release in enumerate(kept.rounds)
        ]
    )
    whitened = sum(
        coefficient * np.vstack([np.zeros((lag, DIMENSION)), rests])[: len(rests)]
        for lag, coefficient in enumerate(declared.coefficients)
    )
    for number, row in enumerate(np.asarray(whitened)):
        drawn = KeyedNoise(77, "server transform", 0, number).draw_normal(CHANGE_STREAM, DIMENSION).numpy()
        np.testing.assert_allclose(row, declared.noise_multiplier * drawn, atol=1e-5)


def test_the_declared_noise_is_that_of_the_account_and_the_models_part() -> None:
    training = assemble_run(private_pairwise(), DataCache())[1].training
    declared = find_declared_noise(training)
    assert declared is not None
    assert training.account is not None
    assert declared.noise_multiplier == pytest.approx(training.account.noise_multiplier / math.sqrt(0.9))
    assert declared.proven_mu == pytest.approx(math.sqrt(CYCLES) / declared.noise_multiplier)
    assert declared.proven_model_epsilon < declared.proven_epsilon == pytest.approx(8.0, abs=0.01)
    assert declared.participations == CYCLES


def test_numbers_of_canaries_and_repetitions() -> None:
    assert choose_numbers(40, None, None) == (40, 5)
    assert choose_numbers(5000, None, None) == (200, 1)
    assert choose_numbers(10, None, None) == (10, 10)
    assert choose_numbers(40, 20, 3) == (20, 3)
    with pytest.raises(ValueError, match="canaries is 41; the model has 40 parameters"):
        choose_numbers(40, 41, None)
    with pytest.raises(ValueError, match="the model has 3 parameters"):
        choose_numbers(3, None, None)


# --------------------------------------------------------------------------------------------- audits of whole runs


@pytest.fixture(scope="module")
def correct(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunAudit]:
    folder = make_folder(tmp_path_factory.mktemp("correct"), private_pairwise())
    return folder, audit_run(folder)


def test_a_correct_private_run_is_consistent(correct: tuple[Path, RunAudit]) -> None:
    folder, audit = correct
    assert audit.canaries is not None
    declared, result, canaries, repeats, dimension = audit.canaries
    assert (result.verdict, result.reasons, canaries, repeats, dimension) == ("consistent", (), DIMENSION, 5, DIMENSION)
    assert result.canaries_in + result.canaries_out == 200
    # The canaries attain the bound: the estimate has an error of about 0.15.
    assert result.mu == pytest.approx(declared.proven_mu, abs=0.6)
    assert 0 < result.epsilon_clopper_pearson < result.epsilon
    assert result.noise.deviation == pytest.approx(1, abs=0.05)
    assert json.loads((folder / "audit.json").read_text()) == json.loads(json.dumps(audit.to_document()))
    text = " ".join(describe_audit(audit).values())
    assert "epsilon 8.00 (delta 0.001)" in text
    assert "No sign of a privacy bug. The estimate is consistent with the proof" in text


def test_the_folder_is_only_read_and_an_audit_can_be_repeated(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_config(**PRIVATE))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    seen: list[Progress] = []
    first = audit_run(folder, repeats=2, add_bar=lambda name: seen.append)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.name != "audit.json" and path.is_file()} == (
        before
    )
    assert audit_run(folder, repeats=2)._replace(seconds=0) == first._replace(seconds=0)
    assert audit_run(folder, repeats=2, seed=1)._replace(seconds=0, seed=0) != first._replace(seconds=0)
    assert [progress.done for progress in seen] == list(range(2 * GROUPS * CYCLES + 1))
    assert seen[-1].phase == "done"


@pytest.mark.parametrize(
    "settings",
    [
        {"participation": "cyclic-poisson", "rate": 0.5},
        {"transforms": (ClientDP(clip_quantile=0.5),)},
        {"transforms": (ClientDP(bands=1),)},
        {"stop_at_epsilon": 5.0},
        {"noise_source": "secret"},
    ],
    ids=["draws", "adaptive clip", "one band", "early stop", "secret noise"],
)
def test_every_kind_of_private_run_is_consistent(tmp_path: Path, settings: dict[str, Any]) -> None:
    audit = audit_run(make_folder(tmp_path, make_config(**PRIVATE, **settings)), repeats=3)
    assert audit.canaries is not None
    assert (audit.canaries.result.verdict, audit.canaries.result.reasons) == ("consistent", ())
    assert audit.pools is None
    if "stop_at_epsilon" in settings:
        assert audit.canaries.declared.participations < CYCLES
        assert audit.canaries.declared.proven_epsilon <= 5
    if "rate" in settings:
        assert "who knows which clients were drawn" in describe_audit(audit)["draws"]


# ------------------------------------------------------------------------------------------------- planted faults


def leave_unclipped(self: NoisedClientDP, upload: Upload, state: Tree, key: Any, announced: Tree = ()) -> Any:
    return upload, state


def reuse_first_noise(correct: Callable[..., Any]) -> Callable[..., Any]:
    def server(self: NoisedClientDP, mean: Tree, state: Tree, server_round: ServerRound) -> Any:
        return correct(self, mean, state, server_round._replace(noise=KeyedNoise("the same in every round")))

    return server


def add_noise_once(correct: Callable[..., Any]) -> Callable[..., Any]:
    def server(self: NoisedClientDP, mean: Tree, state: Tree, server_round: ServerRound) -> Any:
        noised, changed = correct(self, mean, state, server_round)
        return (noised if server_round.phase.round == 0 else mean), changed

    return server


def use_other_bands(correct: Callable[..., Any]) -> Callable[..., Any]:
    def server(self: NoisedClientDP, mean: Tree, state: Tree, server_round: ServerRound) -> Any:
        independent = (1.0, *(0.0,) * (len(self.coefficients) - 1))
        return correct(replace(self, coefficients=independent), mean, state, server_round)

    return server


@pytest.mark.parametrize(
    ("method", "fault", "reason"),
    [
        ("client", lambda correct: leave_unclipped, "the clip norm allows"),
        ("server", reuse_first_noise, "the noise is repeated or has other bands"),
        ("server", add_noise_once, "the noise is too small"),
        ("server", use_other_bands, "has other bands than declared"),
    ],
    ids=["missing clip", "noise reused", "noise once", "wrong bands"],
)
@pytest.mark.parametrize("method_name", ["cycp-pairwise", "cycp-minimax"])
def test_planted_faults_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method_name: str, method: str, fault: Any, reason: str
) -> None:
    monkeypatch.setattr(NoisedClientDP, method, fault(getattr(NoisedClientDP, method)))
    settings: dict[str, Any] = {"pool": "histogram"} if method_name == "cycp-pairwise" else {}
    audit = audit_run(make_folder(tmp_path, make_config(method_name, **PRIVATE, **settings)), repeats=3)
    assert audit.is_violated
    assert audit.canaries is not None
    assert reason in " ".join(audit.canaries.result.reasons)
    assert describe_audit(audit)["verdict"].startswith("VIOLATED: ")


def test_less_noise_than_the_account_says_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, correct = make_folder(tmp_path, make_config(**PRIVATE)), NoisedClientDP.server

    def server(self: NoisedClientDP, mean: Tree, state: Tree, server_round: ServerRound) -> Any:
        assert self.noise_multiplier is not None
        return correct(replace(self, noise_multiplier=0.7 * self.noise_multiplier), mean, state, server_round)

    monkeypatch.setattr(NoisedClientDP, "server", server)
    audit = audit_run(folder, repeats=3)
    assert audit.canaries is not None
    assert "the noise is too small" in audit.canaries.result.reasons[0]
    assert audit.canaries.result.noise.deviation == pytest.approx(0.7, abs=0.05)


# ------------------------------------------------------------------------------------------------------ score pools


def test_the_raw_pool_leaks_rows_and_the_histogram_pool_does_not(
    correct: tuple[Path, RunAudit], tmp_path: Path
) -> None:
    plain = audit_run(make_folder(tmp_path, make_config("cycp-pairwise")))
    assert plain.canaries is None
    assert not plain.is_violated
    for audit, shared in ((plain, "raw"), (correct[1], "histogram")):
        assert audit.pools is not None
        assert audit.pools.shared == shared
        assert [attack.label for attack in audit.pools.classes] == ["positive", "negative"]
        for attack in audit.pools.classes:
            assert attack.raw_auc.low > 0.75
            assert attack.raw_auc.low > attack.histogram_auc.high + 0.1
            assert attack.histogram_auc.estimate == pytest.approx(0.5, abs=0.12)
    facts = describe_audit(plain)
    assert "no epsilon" in facts["proven"]
    assert "which leaks: --algorithm.pool histogram" in facts["pools"]


def test_recorded_scores_change_nothing_and_make_the_pool_that_was_binned() -> None:
    """Without noise, the histogram of the raw pool is the pool of the server, whose clients binned these scores."""
    config = make_config("cycp-pairwise", pool="histogram", dtype="float64", weighting="paper")
    recorded = RecordedPairwise.of(config.recipe.algorithm)  # type: ignore[arg-type]
    _, (training, _, start) = assemble_run(
        replace(config, recipe=replace(config.recipe, algorithm=recorded)), DataCache()
    )
    recorder = PoolRecorder(training, recorded)
    for replayed in replay_rounds(training, start):
        recorder.observe_round(replayed)
    last = assemble_run(config, DataCache())[1]
    expected = [finished.state for finished in last.training.rounds(last.start)][-1].server.shared
    actual = replayed.finished.state.server.shared
    assert all(
        torch.equal(left, right)
        for left, right in zip(list_change_leaves(actual), list_change_leaves(expected), strict=True)
    )
    raw = recorder.rebuild_raw_pool()
    ends = expected.pool.ends.numpy()
    centers = np.linspace(ends[0], ends[1], 24)
    for side in range(2):
        shares = 1 - np.abs(raw[side].numpy()[:, None] - centers) / (centers[1] - centers[0])
        np.testing.assert_allclose(np.maximum(shares, 0).mean(0), expected.pool.masses[side].numpy(), atol=1e-12)


def test_the_raw_pool_of_a_raw_run_is_the_servers() -> None:
    config = make_config("cycp-pairwise", cycles=2)
    _, (training, _, start) = assemble_run(config, DataCache())
    recorder = PoolRecorder(training, config.recipe.algorithm)  # type: ignore[arg-type]
    for replayed in replay_rounds(training, start):
        recorder.observe_round(replayed)
    pool = recorder.rebuild_raw_pool()
    assert all(map(torch.equal, pool, replayed.finished.state.server.private.pool))
    masses, ends = recorder.find_histogram(pool)
    assert masses.sum(-1).tolist() == pytest.approx([1, 1])
    assert ends.tolist() == [-8, 8]


# --------------------------------------------------------------------------------------------------------- mistakes


def test_mistakes_have_one_line_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a run folder"):
        audit_run(tmp_path)
    folder = make_folder(tmp_path, make_config())
    with pytest.raises(
        ValueError, match="cycp-fedavg shares no scores, and no client-dp protects its clients; train it with"
    ):
        audit_run(folder)
    assert not (folder / "audit.json").exists()
    with pytest.raises(ValueError, match="canaries is 3; it must be at least 4"):
        audit_run(folder, canaries=3)
    with pytest.raises(ValueError, match="repeats is 0"):
        audit_run(folder, repeats=0)
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps(environment | {"data": "other"}))
    with pytest.raises(ValueError, match="fingerprint"):
        audit_run(folder)


def test_a_run_with_an_infinite_budget_has_no_epsilon_to_audit(tmp_path: Path) -> None:
    audit = audit_run(
        make_folder(tmp_path, make_config("cycp-pairwise", pool="histogram", epsilon=math.inf, delta=1e-3))
    )
    assert audit.canaries is None
    assert audit.pools is not None


def test_privacy_of_single_rows_is_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"pool": "histogram", "wrappers": (ExampleDP(),), **PRIVATE}
    folder = make_folder(tmp_path, make_config("cycp-pairwise", **settings))
    with pytest.raises(ValueError, match="protects single rows with example-dp; canaries are whole clients"):
        audit_run(folder)


def test_a_pool_with_estimates_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_config("cycp-partial-auc"))
    with pytest.raises(ValueError, match="cycp-partial-auc, which shares values of single rows that this audit cannot"):
        audit_run(folder)


@pytest.mark.slow
def test_false_alarms_are_rare_and_the_estimate_is_unbiased(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, make_config(**PRIVATE))
    audits = [audit_run(folder, seed=seed).canaries for seed in range(40)]
    results = [audit.result for audit in audits if audit is not None]
    assert {result.verdict for result in results} == {"consistent"}
    # The bound is attained up to the last rounds, whose noise is not whitened by later ones.
    assert np.mean([result.mu for result in results]) == pytest.approx(results[0].proven_mu, rel=0.06)
    # More than 6 of 40 at 5 % has probability 3e-3.
    assert sum(result.mu_low > result.proven_mu for result in results) <= 6
