"""Private runs: what is refused and why, what is spent, when a run stops, and that resuming changes nothing."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import dp_accounting
import pytest
import torch
from torch import nn

import fedauc
from fedauc.algorithms.fedavg import FedAvg
from fedauc.data.datasets.synthetic import Synthetic
from fedauc.experiments.comparison import Comparison
from fedauc.experiments.config import Config
from fedauc.experiments.decisions import describe_private_runs, log_once
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.run_loop import Progress, RunPaused
from fedauc.experiments.runner import Run
from fedauc.interfaces import (
    Download,
    Model,
    Roster,
    Schedule,
    ScoreHistogram,
    Server,
    Setting,
    Upload,
    UploadTransform,
)
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.cyclic_poisson import CyclicPoisson
from fedauc.participation.trace import Trace
from fedauc.participation.uniform import Uniform
from fedauc.testing.small_federation import FEATURES, assemble_small, small_recipe
from fedauc.transforms.client_dp import ClientDP
from fedauc.transforms.clip import Clip
from fedauc.transforms.quantize import Quantize
from fedauc.transforms.robust_means import Median
from fedauc.transforms.secure_sum import SecureSum
from fedauc.trees import Tree, tree_map


@dataclass(frozen=True)
class DrawsTwice(Cyclic):
    """A participation of a user, which visits every group in two rounds."""

    def bind(self, clients: Roster, seed: int) -> Schedule:
        """Groups of which every other one is a copy of the one before it."""
        schedule = super().bind(clients, seed)
        schedule.groups = [group for group in schedule.groups for _ in range(2)]
        schedule.cycle_length *= 2
        return schedule


@dataclass(frozen=True, kw_only=True)
class Doubling(UploadTransform):
    """A transform of a user, which doubles every upload at the server."""

    name: ClassVar[str] = "doubling"

    def decode(self, upload: Upload, shared: Tree) -> Upload:
        """Twice the change."""
        return upload._replace(mean=tree_map(lambda leaf: 2 * leaf, upload.mean))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fixed-size draws": (
        {"participation": Cyclic(per_round=1)},
        "^per_round is 1; draws of a fixed size make clients depend on each other, and no amplification is proven",
    ),
    "uniform draws": ({"participation": Uniform()}, "^participation is 'uniform'; draws of a fixed size make clients"),
    "reshuffled groups": ({"participation": Cyclic(order="reshuffled")}, "^order is 'reshuffled'; a client's turns"),
    "a trace without turns": (
        {"participation": Trace(rows=((0, 0), (5, 1)), cycle_length=3)},
        "^participation is 'trace'; a client's turns can have any distance",
    ),
    "a robust mean": ({"mean": Median()}, "^mean is 'median'; the effect of one client on it has no bound"),
    "quantization after clipping": (
        {"transforms": (ClientDP(), Quantize())},
        "^transforms lists 'quantize' after 'client-dp', where it could enlarge what was clipped: leave 'quantize' out",
    ),
    "personal heads": ({"wrappers": "personal-head"}, "^clients keep a part of the model, such as a personal head"),
    "coarse numbers": ({"dtype": "bfloat16"}, "^dtype is 'bfloat16', whose rounding can enlarge a clipped upload"),
    "coarse integers": (
        {"transforms": (ClientDP(), SecureSum(noise="server", scale_bits=4, minimum_cohort=2))},
        "^scale_bits is 4; rounding could enlarge an upload of norm 0.1 by 0.07",
    ),
    "a large delta": ({"delta": 0.5}, "^delta is 0.5; with 7 clients it must be below 1/7 = 0.14"),
    "no bound on an upload": (
        {"transforms": (ClientDP(clip=float("inf")),)},
        "^clip is inf, so that nothing bounds what a client changes, and no noise hides it; lower clip",
    ),
    "draws of a class that extends a covered one": (
        {"participation": DrawsTwice()},
        "^participation is 'cyclic'; a client's turns can have any distance",
    ),
    "a transform that changes clipped uploads at the server": (
        {"transforms": (Doubling(), ClientDP())},
        "^transforms lists 'doubling', which changes uploads again at the server",
    ),
    "more bands than rounds in a cycle": (
        {"transforms": (ClientDP(bands=4),)},
        "^bands is 4, but a cycle has 3 rounds; a client's noise would overlap",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_proof_does_not_cover_is_refused(case: str) -> None:
    settings, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        assemble_small(small_recipe("cycp-fedavg", epsilon=2.0, **settings))


def test_raw_scores_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^cycp-pairwise shares the raw scores of rows \(pool is 'cycle'\)"):
        assemble_small(small_recipe("cycp-pairwise", epsilon=2.0))


class SharesLoss(FedAvg):
    """An algorithm of a user, which uploads a number per client beside the change of the model."""

    def finish(self, download: Download, client_state: Tree, local: Tree, emitted: Tree) -> tuple[Upload, Tree]:
        upload, state = super().finish(download, client_state, local, emitted)
        return upload._replace(pool=(local.weights.sum(-1),)), state


@pytest.mark.parametrize("transforms", [(ClientDP(noise_multiplier=1.0),), (SecureSum(minimum_cohort=2),)])
def test_an_algorithm_that_uploads_more_than_a_change_is_refused(transforms: tuple[UploadTransform, ...]) -> None:
    training, _, start = assemble_small(small_recipe("cycp-fedavg", algorithm=SharesLoss(), transforms=transforms))
    with pytest.raises(ValueError, match=f"^transforms lists '{transforms[0].name}', but the algorithm uploads a pool"):
        next(training.rounds(start))


class SharesHistogram(FedAvg):
    """An algorithm of a user, whose shared state holds a histogram of scores that is used in every round."""

    def init(self, setting: Setting, model: Model) -> Server:
        histogram = ScoreHistogram(torch.zeros(2, 4), torch.zeros(2))
        return Server(shared=(model, histogram), anchor=(model, histogram))


def test_histograms_without_noise_are_refused() -> None:
    recipe = small_recipe("cycp-fedavg", algorithm=SharesHistogram(), epsilon=2.0)
    with pytest.raises(ValueError, match=r"^the algorithm uploads histograms of scores, which get no noise"):
        assemble_small(recipe)


def test_models_with_buffers_are_refused() -> None:
    module = nn.Sequential(nn.Linear(FEATURES, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    with pytest.raises(ValueError, match=r"^the model has buffers, such as BatchNorm statistics"):
        assemble_small(small_recipe("cycp-fedavg", epsilon=2.0), module)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transforms": (ClientDP(),)}, "^client-dp has neither a noise multiplier nor a budget"),
        ({"transforms": (ClientDP(noise_multiplier=1.0),), "epsilon": 2.0}, "^epsilon is 2 and noise_multiplier is 1"),
        ({"stop_at_epsilon": 2.0}, "^stop_at_epsilon is 2, but the run is not private"),
        ({"epsilon": 0.0}, "^epsilon is 0.0; it must be a number above 0"),
        ({"transforms": (ClientDP(noise_multiplier=1.0, clip=float("inf")),)}, "^clip is inf, so that nothing bounds"),
        ({"transforms": (Quantize(),), "epsilon": 2.0}, "^transforms lists 'quantize', and epsilon adds 'client-dp'"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe.of("cycp-fedavg", **settings)


def test_a_trace_over_whole_groups_is_covered() -> None:
    rows = tuple((round, client) for round in range(6) for client in range(8) if (round + client) % 3)
    schedule = Cyclic(given=((0, 1), (3, 4), (5, 6, 7)))
    training, _, start = assemble_small(
        small_recipe("cycp-fedavg", epsilon=2.0, participation=Trace(rows=rows, schedule=schedule))
    )
    for finished in training.rounds(start):
        # The denominator counts those who are absent.
        assert finished.cohort.divisor == len(schedule.given[finished.phase.round % 3])


def test_clipping_before_is_allowed_and_a_budget_adds_the_transform() -> None:
    recipe = small_recipe("cycp-fedavg", epsilon=2.0, transforms=(Clip(norm=0.5),))
    assert [transform.name for transform in recipe.transforms] == ["clip", "client-dp"]
    assert assemble_small(recipe).training.account is not None


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_the_calibrated_run_spends_its_budget_and_no_more(rate: float) -> None:
    """Independently composed by dp-accounting, with the class counts, on its default grid."""
    participation = CyclicPoisson(rate=rate, groups=3, assignment="random")
    training, _, _ = assemble_small(
        small_recipe("cycp-fedavg", epsilon=3.0, delta=1e-4, cycles=20, participation=participation)
    )
    account = training.account
    assert account is not None
    assert 2.98 < training.spent_epsilon(60) <= 3.0  # type: ignore[operator]
    accountant = dp_accounting.pld.PLDAccountant()
    step = dp_accounting.GaussianDpEvent(account.noise_multiplier)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, step) if rate < 1 else step, 20)
    assert [name for name, _ in account.one_off] == ["class counts"]
    accountant.compose(dp_accounting.GaussianDpEvent(account.one_off[0][1]))
    assert accountant.get_epsilon(1e-4) == pytest.approx(3.0, abs=0.01)


def test_the_length_of_stages_does_not_depend_on_who_is_drawn() -> None:
    """The rule of the theorem divides by the clients per round: those that are expected."""
    settings = {"epsilon": 3.0, "stages": "theory", "participation": CyclicPoisson(rate=0.5)}
    stages = [
        assemble_small(small_recipe("cycp-minimax", seed=seed, **settings)).training.plan.stages for seed in range(6)
    ]
    assert all(drawn == stages[0] for drawn in stages)


def test_clients_work_with_noised_class_totals() -> None:
    training, _, _ = assemble_small(small_recipe("cycp-fedavg", epsilon=3.0))
    assert training.setting.totals is not None
    assert training.setting.totals.holders != (5.0, 6.0)
    paper = assemble_small(small_recipe("cycp-fedavg", epsilon=3.0, weighting="paper")).training
    assert paper.setting.totals is None
    assert paper.account is not None
    assert paper.account.one_off == ()


# ------------------------------------------------------------------------------------------------------- run folders


def make_config(**settings: Any) -> Config:
    recipe = Recipe.of("cycp-minimax", cycles=6, groups=3, epsilon=4.0, delta=1e-3, **settings)
    return Config(recipe=recipe, data=Synthetic(clients=12, rows_per_client=30))


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "records.jsonl").read_text().splitlines()]


def pause_after(rounds: int) -> Any:
    def observe(progress: Progress) -> None:
        if progress.done >= rounds:
            raise RunPaused

    return observe


@pytest.mark.parametrize("noise_source", ["seed", "secret"])
def test_a_resumed_run_neither_spends_twice_nor_forgets(tmp_path: Path, noise_source: str) -> None:
    config = make_config(noise_source=noise_source)
    run = Run.create(config, tmp_path / "run")
    with pytest.raises(RunPaused):
        run.train_to_end(pause_after(7))
    Run.resume(tmp_path / "run").train_to_end()
    records = read_records(tmp_path / "run")
    epsilons = [record["epsilon"] for record in records]
    assert epsilons == sorted(epsilons)
    assert 3.98 < epsilons[-1] <= 4.0
    if noise_source == "seed":
        Run.create(config, tmp_path / "whole").train_to_end()
        assert read_records(tmp_path / "whole") == records
    else:
        mode = stat.S_IMODE((tmp_path / "run" / "noise.key").stat().st_mode)
        assert mode == 0o600
        (tmp_path / "run" / "noise.key").unlink()
        with pytest.raises(ValueError, match=r"noise\.key is missing; put the secret"):
            Run.resume(tmp_path / "run")


def test_two_runs_with_secrets_have_different_noise(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Run.create(make_config(noise_source="secret"), tmp_path / name).train_to_end()
    first, second = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("a", "b"))
    assert not all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_stops_before_it_spends_more_than_it_may(tmp_path: Path) -> None:
    config = make_config()
    config = replace(config, recipe=replace(config.recipe, stop_at_epsilon=2.5))
    result = Run.create(config, tmp_path / "run").train_to_end()
    spent = read_records(tmp_path / "run")[-1]["epsilon"]
    assert spent <= 2.5
    assert "the run stops at 2.5" in result["stopped_early"]
    # One more cycle would have been too much.
    rest = Run.create(make_config(), tmp_path / "whole")
    rest.train_to_end()
    assert min(record["epsilon"] for record in read_records(tmp_path / "whole") if record["epsilon"] > spent) > 2.5


def test_several_private_runs_are_told_what_they_reveal_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A comparison says it before it trains; with a secret each run has noise of its own."""
    recipes = [make_config(learning_rate=rate).recipe for rate in (0.1, 0.2)]
    (shared,) = describe_private_runs(recipes)
    assert shared.startswith("2 private runs on the same clients spend their budgets one after another")
    assert "Runs with the same seed share their noise, so that their difference has none" in shared
    for others in (
        [replace(recipe, noise_source="secret") for recipe in recipes],
        [recipes[0], make_config(seed=1).recipe],
    ):
        assert describe_private_runs(others) == [shared.partition(". Runs")[0]]
    assert describe_private_runs([recipes[0], Recipe.of("cycp-minimax")]) == []
    log_once.cache_clear()
    with caplog.at_level("INFO", "fedauc"):
        Comparison.create(tmp_path / "runs", {"a": make_config(learning_rate=0.1), "b": make_config(learning_rate=0.2)})
    assert shared in caplog.messages


def test_fit_takes_a_budget() -> None:
    fitted = fedauc.fit(
        "linear", Synthetic(clients=12, rows_per_client=30), "cycp-fedavg", cycles=2, groups=3, epsilon=50.0, delta=1e-3
    )
    assert fitted.recipe.epsilon == 50.0
    assert fitted.epsilon is not None
    assert 49.5 < fitted.epsilon <= 50.0
    assert [transform.name for transform in fitted.recipe.transforms] == ["client-dp"]
