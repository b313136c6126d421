"""One ledger for everything that a private run releases: models, class counts, standardisation and evaluations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pandas
import pytest
import torch

import fedauc
from fedauc.data.clients import Examples
from fedauc.data.datasets.synthetic import Synthetic
from fedauc.data.partitions import IID
from fedauc.data.preparation import Preparation
from fedauc.experiments.config import Config
from fedauc.experiments.private_evaluation import NoisedEvaluation, count_evaluations
from fedauc.experiments.private_standardization import standardize_privately
from fedauc.experiments.private_training import standardization_noise
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.run_loop import Progress, RunPaused
from fedauc.experiments.runner import DataCache, Run, assemble_run, make_evaluator
from fedauc.metrics.histogram_auc import histogram_auc
from fedauc.participation.cyclic_poisson import CyclicPoisson
from fedauc.privacy.evaluation_histograms import clipped_histogram
from fedauc.privacy.statistics import noised_moments
from fedauc.random_tensors import KeyedNoise
from fedauc.reports.page import render_page
from fedauc.reports.report_runs import read_report_runs
from fedauc.reports.summary import compare_methods, summarize_run
from fedauc.reports.tables import print_run
from fedauc.reports.watch import read_watched
from fedauc.testing.small_federation import assemble_small, small_recipe
from fedauc.transforms.client_dp import ClientDP
from fedauc.wrappers.example_dp import ExampleDP

BOUNDS = (200.0, 5.0)
PRIVATE = ClientDP(standardization="private", column_bounds=BOUNDS, evaluation_norm=5.0)
FOUND = ("scores.npz", "scorer.json", "reference_scores.npz")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 clients with two columns of numbers of different scales."""
    draw, rows = np.random.Generator(np.random.Philox(3)), 4800
    label = draw.random(rows) < 0.3
    columns = {
        "age": 60 + 20 * draw.standard_normal(rows) + 15 * label,
        "level": 0.5 * draw.standard_normal(rows) - 0.5 * label,
        "client": [f"c{number % 120:03d}" for number in range(rows)],
        "y": label.astype(int),
    }
    path = tmp_path_factory.mktemp("data") / "rows.csv"
    pandas.DataFrame(columns).to_csv(path, index=False)
    return path


def make_config(table: Path, evaluate_every: int = 2, **settings: Any) -> Config:
    chosen: dict[str, Any] = {
        "cycles": 5,
        "groups": 4,
        "local_steps": 2,
        "epsilon": 60.0,
        "delta": 1e-3,
        "transforms": (PRIVATE,),
        "private_evaluation": True,
    }
    recipe = Recipe.of("cycp-minimax", **{**chosen, **settings})
    return Config(
        recipe=recipe,
        data=fedauc.Table(str(table), client="client", validation_fraction=0.2),
        evaluate_every=evaluate_every,
    )


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "records.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "private"
    Run.create(make_config(table), path).train_to_end()
    return path


# ---------------------------------------------------------------------------------------------------- the joint ledger


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_epsilon_is_that_of_all_parts_together(table: Path, tmp_path: Path, rate: float) -> None:
    """Composed by dp-accounting from the noise that each part really has; the AUC is unknown at such a budget."""
    participation = CyclicPoisson(rate=rate, groups=4, assignment="random")
    config = replace(
        make_config(table), recipe=Recipe.of("cycp-minimax", **list_settings(table), participation=participation)
    )
    run = Run.create(config, tmp_path / "run")
    run.train_to_end()
    records = read_records(tmp_path / "run")
    assert [record["round"] for record in records] == [7, 15, 19], "after cycles 2 and 4, and after the last one"
    account, evaluator = run.assembly.training.account, make_evaluator(config, run.data, run.assembly)
    assert account is not None
    assert evaluator.noised is not None
    assert [name for name, _ in account.one_off] == ["class counts", "standardisation"]
    for number, record in enumerate(records, 1):
        accountant = dp_accounting.pld.PLDAccountant()
        step = dp_accounting.GaussianDpEvent(account.noise_multiplier)
        turns = -(-(record["round"] + 1) // 4)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, step) if rate < 1 else step, turns)
        for _, noise in account.one_off:
            accountant.compose(dp_accounting.GaussianDpEvent(noise))
        # Test and validation rows are a release each.
        accountant.compose(dp_accounting.GaussianDpEvent(evaluator.noised.multiplier), 2 * number)
        assert record["epsilon"] == pytest.approx(accountant.get_epsilon(1e-3), rel=2e-3)
    assert 3.98 < records[-1]["epsilon"] <= 4.0


def list_settings(table: Path) -> dict[str, Any]:
    """The settings of `make_config` without its schedule, with a small budget."""
    recipe = make_config(table, epsilon=4.0).recipe
    names = ("cycles", "local_steps", "epsilon", "delta", "transforms", "private_evaluation")
    return {name: getattr(recipe, name) for name in names}


def test_every_part_has_its_share_of_the_budget(table: Path) -> None:
    """In the units of Gaussian privacy, where costs s^-2 add up to that of a single release with the whole budget."""
    data, assembly = assemble_run(make_config(table), DataCache())
    account = assembly.training.account
    assert account is not None
    assert account.evaluation_noise is not None
    single = dp_accounting.get_sigma_gaussian(60.0, 1e-3)
    shares = {name: (single / noise) ** 2 for name, noise in account.one_off}
    shares["evaluation"] = 3 * (single / account.evaluation_noise) ** 2
    shares["training"] = 5 * (single / account.noise_multiplier) ** 2
    assert shares == pytest.approx(
        {"class counts": 0.01, "standardisation": 0.02, "evaluation": 0.05, "training": 0.92}, rel=2e-3
    )
    assert data.split.validation is not None


@pytest.mark.parametrize("every", [1, 2, 3, 7])
@pytest.mark.parametrize("method", ["cycp-minimax", "cycp-pairwise"])
def test_planned_evaluations_are_those_that_happen(table: Path, tmp_path: Path, every: int, method: str) -> None:
    """Pairwise methods begin with a cycle that only scores rows, which is not evaluated."""
    recipe = Recipe.of(method, cycles=5, groups=4, local_steps=1)
    run = Run.create(Config(recipe=recipe, data=Synthetic(clients=8), evaluate_every=every), tmp_path / "run")
    run.train_to_end()
    assert len(read_records(tmp_path / "run")) == count_evaluations(run.assembly.training.plan, every)


def test_a_resumed_run_has_the_same_records_and_the_same_ledger(table: Path, finished: Path, tmp_path: Path) -> None:
    run = Run.create(make_config(table), tmp_path / "run")

    def pause(progress: Progress) -> None:
        if progress.done == 9:
            raise RunPaused

    with pytest.raises(RunPaused):
        run.train_to_end(pause)
    assert len(read_records(tmp_path / "run")) == 1
    Run.resume(tmp_path / "run").train_to_end()
    for name in ("records.jsonl", "privacy.json"):
        assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes()
    first, second = (torch.load(path / "model.pt", weights_only=True) for path in (tmp_path / "run", finished))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("limit", [25.0, 40.0, 60.0])
def test_a_run_stops_with_enough_left_for_its_last_evaluation(table: Path, tmp_path: Path, limit: float) -> None:
    run = Run.create(make_config(table, stop_at_epsilon=limit), tmp_path / "run")
    result = run.train_to_end()
    training, records = run.assembly.training, read_records(tmp_path / "run")
    assert records[-1]["epsilon"] <= limit
    rounds = records[-1]["rounds"]
    assert ("stopped_early" in result) == (limit < 60)
    if limit < 60:
        # A further round and an evaluation after it would have been too much.
        needed = training.spent_epsilon(rounds + 1, len(records) + 1)
        assert needed is not None
        assert needed > limit


def test_a_limit_below_the_first_round_is_refused(table: Path) -> None:
    with pytest.raises(ValueError, match=r"^stop_at_epsilon is 1, but the first round spends [0-9.]+: raise it"):
        assemble_run(make_config(table, stop_at_epsilon=1.0), DataCache())


# --------------------------------------------------------------------------------------------------- private evaluation


def make_rows() -> tuple[np.ndarray, Examples]:
    draw = np.random.Generator(np.random.Philox(5))
    labels = torch.from_numpy((np.arange(1200) % 3 == 0).astype(np.float64))
    scores = draw.standard_normal(1200) + 1.5 * labels.numpy()
    names = np.array([f"client {number % 60}" for number in range(1200)])
    return scores, Examples(torch.zeros(1200, 1), labels, names)


def test_evaluation_noise_follows_from_seed_round_and_part() -> None:
    scores, examples = make_rows()

    def measure(seed: int = 0, part: str = "test", round: int = 3, secret: bytes | None = None) -> float:
        interval = NoisedEvaluation(1.0, 10.0, 16, seed, secret).measure_auc(scores, examples, part, round)
        assert interval is not None
        return interval.estimate

    assert measure() == measure()
    values = [measure(), measure(seed=1), measure(round=4), measure(part="validation"), measure(secret=bytes(32))]
    assert len(set(values)) == 5
    assert measure(secret=bytes(32)) == measure(secret=bytes(32))


def test_the_auc_is_that_of_the_noised_histogram() -> None:
    scores, examples = make_rows()
    owner = np.array([int(name.split()[1]) for name in examples.clients.tolist()])  # type: ignore[union-attr]
    exact = clipped_histogram(scores, examples.labels.numpy(), owner, 60, 16, 10.0)
    normal = KeyedNoise(7, "evaluation", 3).draw_normal(0, 32).numpy().reshape(2, 16)
    assert NoisedEvaluation(0.5, 10.0, 16, 7).measure_auc(scores, examples, "test", 3) == histogram_auc(
        exact + 5.0 * normal, 5.0
    )


def test_records_hold_the_noised_auc_and_nothing_exact(table: Path, finished: Path) -> None:
    config = make_config(table)
    data, assembly = assemble_run(config, DataCache())
    evaluator = make_evaluator(config, data, assembly)
    assert evaluator.noised is not None
    final = read_records(finished)[-1]
    assert final["low"] < final["auc"] < final["high"]
    assert final["average_precision"] is None
    assert "loss" not in final
    module = config.model.build((2,), 0)
    module.load_state_dict(torch.load(finished / "model.pt", weights_only=True))
    with torch.no_grad():
        scores = module(data.split.test.inputs).flatten().double().numpy()
    measured = evaluator.noised.measure_auc(scores, data.split.test, "test", 19)
    assert measured is not None
    assert final["auc"] == measured.estimate
    result = json.loads((finished / "result.json").read_text())
    assert set(result["not_released"]) == {"scores", "calibration"}
    assert "client_auc" not in result
    assert not any((finished / name).exists() for name in FOUND)
    with pytest.raises(ValueError, match=r"its run was private, and there were no public rows to calibrate on"):
        fedauc.load(finished)


def test_an_auc_that_noise_hides_is_unknown(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(table, evaluate_every=1, epsilon=0.5, keep="best", patience=4)
    Run.create(config, tmp_path / "run").train_to_end()
    records = read_records(tmp_path / "run")
    assert all(record["auc"] is None and record["validation_auc"] is None for record in records)
    assert records[-1]["epsilon"] <= 0.5
    run = read_report_runs([tmp_path / "run"])
    assert "the noise of the private evaluation hides it" in render_page(run)
    print_run(run[0].folder)
    assert "AUC unknown, because noise hides it" in capsys.readouterr().out
    assert np.isnan(compare_methods([("a", run[0].folder)])[0].value)
    assert "hides it" in (tmp_path / "run" / "MODEL_CARD.md").read_text()


def test_privacy_of_examples_is_stated_too(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"cycles": 2, "groups": 4, "local_steps": 2, "epsilon": 5.0, "wrappers": (ExampleDP(),)}
    config = replace(make_config(table), recipe=Recipe.of("cycp-fedavg", **settings))
    result = Run.create(config, tmp_path / "run").train_to_end()
    assert "loss" not in result["final"]
    assert result["final"]["epsilon"] == pytest.approx(5.0, rel=1e-3)
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["unit"] == "example"
    print_run(read_report_runs([tmp_path / "run"])[0].folder)
    assert "of a budget of 5, at delta 1e-05, for an example" in " ".join(capsys.readouterr().out.split())
    assert "the run is differentially private for every example" in (tmp_path / "run" / "environment.json").read_text()
    page = render_page(read_report_runs([tmp_path / "run"]))
    assert "also from the server" in page
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["data"] not in page
    with pytest.raises(ValueError, match=r"^private_evaluation is true, but 'example-dp' protects training rows alone"):
        Recipe.of("cycp-fedavg", private_evaluation=True, **settings)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other metrics": ({"metrics": ("auc", "pauc@0.1")}, r"^metrics lists 'pauc@0.1', but private_evaluation is true"),
    "rows of nobody": (
        {"preparation": Preparation(partition=IID(clients=20))},
        r"^private_evaluation is true, but the validation rows do not say whose they are",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_histograms_cannot_evaluate_is_refused(table: Path, case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        assemble_run(replace(make_config(table), **changes), DataCache())


def test_private_evaluation_needs_privacy_and_held_out_rows() -> None:
    with pytest.raises(ValueError, match=r"^private_evaluation is true, but the run is not private; set epsilon"):
        Recipe.of("cycp-fedavg", private_evaluation=True)
    recipe = small_recipe("cycp-fedavg", epsilon=2.0, private_evaluation=True)
    with pytest.raises(ValueError, match=r"but here nobody evaluates on the clients' held-out rows"):
        assemble_small(recipe)
    clients = fedauc.Clients.from_arrays(np.arange(80.0).reshape(40, 2), np.arange(40) % 2, np.arange(40) // 4)
    with pytest.raises(ValueError, match=r"but there are no held-out rows to evaluate on"):
        fedauc.fit("linear", clients, "cycp-fedavg", epsilon=2.0, delta=1e-3, private_evaluation=True, groups=2)


def test_training_rows_are_never_calibrated_on(table: Path, tmp_path: Path) -> None:
    """Held-out rows are public here; without validation rows, the scores of training rows would be stored."""
    config = make_config(table, private_evaluation=False)
    Run.create(config, tmp_path / "validation").train_to_end()
    assert all((tmp_path / "validation" / name).exists() for name in FOUND)
    config = replace(config, data=fedauc.Table(str(table), client="client"))
    result = Run.create(config, tmp_path / "none").train_to_end()
    assert set(result["not_released"]) == {"calibration"}
    assert "client_auc" in result
    assert [(tmp_path / "none" / name).exists() for name in FOUND] == [True, False, False]
    fitted = fedauc.fit("linear", config.data, config.recipe)
    with pytest.raises(ValueError, match=r"^the model cannot be saved: a calibration and a threshold would come from"):
        fitted.save(tmp_path / "fitted")


# -------------------------------------------------------------------------------------------------- standardisation


def test_rows_are_standardised_by_noised_moments_of_the_raw_columns(table: Path) -> None:
    config = make_config(table)
    exact, private = DataCache().prepare_data(config).split, assemble_run(config, DataCache())[0].split
    frame = pandas.read_csv(table)
    train = frame.iloc[_find_rows(frame, exact)]
    noise = KeyedNoise(0, "standardisation").draw_normal(0, 5).numpy()
    mean, deviation = noised_moments(
        train[["age", "level"]].to_numpy(),
        train["client"].to_numpy(),
        np.array(BOUNDS),
        standardization_noise(config.recipe),
        lambda count: noise[:count],
    )
    assert private.encoder is not None
    assert [(column.shift, column.scale) for column in private.encoder.columns] == [  # type: ignore[union-attr]
        pytest.approx(pair, rel=1e-5) for pair in zip(mean, deviation, strict=True)
    ]
    assert private.test.rows is not None
    tested = frame.iloc[private.test.rows]
    np.testing.assert_allclose(private.test.inputs.numpy(), private.encoder.encode(tested), atol=1e-5)
    np.testing.assert_allclose(
        private.train.inputs.numpy(), (train[["age", "level"]].to_numpy() - mean) / deviation, atol=1e-4
    )
    assert private.validation is not None
    assert exact.validation is not None
    assert not torch.equal(private.validation.inputs, exact.validation.inputs)
    # Rows are of about unit size, so that the noise has not taken over.
    assert 0.4 < float(private.train.inputs.square().mean().sqrt()) < 1.2


def _find_rows(frame: pandas.DataFrame, split: Any) -> np.ndarray:
    """The rows of the file in the order of the training inputs."""
    decoded = (
        split.train.inputs[:, 0].double().numpy() * split.encoder.columns[0].scale + split.encoder.columns[0].shift
    )
    order = np.argsort(frame["age"].to_numpy())
    positions = np.searchsorted(frame["age"].to_numpy()[order], decoded)
    near = [np.clip(positions + step, 0, len(order) - 1) for step in (-1, 0)]
    gaps = [np.abs(frame["age"].to_numpy()[order[index]] - decoded) for index in near]
    return np.asarray(order[np.where(gaps[0] < gaps[1], near[0], near[1])])


def test_an_infinite_budget_adds_nothing_and_promises_nothing(table: Path, tmp_path: Path) -> None:
    config = make_config(table, epsilon=float("inf"), transforms=(ClientDP(evaluation_norm=20.0),))
    Run.create(config, tmp_path / "run").train_to_end()
    assert not (tmp_path / "run" / "privacy.json").exists()
    assert (tmp_path / "run" / "scorer.json").exists()
    assert "epsilon" not in read_records(tmp_path / "run")[-1]


def test_what_cannot_be_standardised_privately_is_refused(table: Path, tmp_path: Path) -> None:
    frame = pandas.read_csv(table)
    frame["city"] = np.where(frame["age"] > 60, "Bern", "Rome")
    frame.to_csv(tmp_path / "cities.csv", index=False)
    cities = replace(make_config(table), data=fedauc.Table(str(tmp_path / "cities.csv")))
    with pytest.raises(
        ValueError, match=r"column 'city' is not a plain number: vocabularies, .* 'public', the default"
    ):
        assemble_run(cities, DataCache())
    with pytest.raises(ValueError, match=r"does not say how its inputs were prepared from columns of numbers"):
        assemble_run(replace(make_config(table), data=Synthetic(clients=40)), DataCache())
    transform = replace(PRIVATE, column_bounds=(1.0, 2.0, 3.0))
    with pytest.raises(ValueError, match=r"^column_bounds has 3 numbers, but there are 2 columns \(age, level\)"):
        assemble_run(make_config(table, transforms=(transform,)), DataCache())
    with pytest.raises(ValueError, match=r"^standardization is 'private' and column_bounds is \(\)"):
        Recipe.of("cycp-fedavg", epsilon=2.0, transforms=(ClientDP(standardization="private"),))
    with pytest.raises(ValueError, match=r"^standardization is 'private', but there is no budget"):
        Recipe.of("cycp-fedavg", transforms=(replace(PRIVATE, noise_multiplier=1.0),))
    with pytest.raises(ValueError, match=r"^standardization is 'private', but rows that are given as arrays"):
        assemble_small(small_recipe("cycp-fedavg", epsilon=2.0, transforms=(PRIVATE,)))


def test_noise_on_the_moments_depends_on_the_seed(table: Path) -> None:
    config = make_config(table)
    split = DataCache().prepare_data(config).split
    first, second = (standardize_privately(split, replace(config.recipe, seed=seed)).train.inputs for seed in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first, standardize_privately(split, config.recipe).train.inputs)


# ------------------------------------------------------------------------------------------------------ what is shown


def test_everybody_who_reads_the_run_sees_its_guarantee(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guarantee, spent = json.loads((finished / "privacy.json").read_text()), read_records(finished)[-1]["epsilon"]
    assert guarantee["epsilon"] == spent
    assert guarantee["evaluations"] == 3
    assert set(guarantee["epsilon_alone"]) == {"training", "class counts", "standardisation", "evaluation"}
    assert all(alone < spent for alone in guarantee["epsilon_alone"].values())
    assert guarantee["public"] == ["the number of clients and who they are", "the schedule", "the names of the columns"]
    decisions = json.loads((finished / "environment.json").read_text())["decisions"]
    sentence = next(text for text in decisions if text.startswith("the run is differentially private for every client"))
    assert f"with epsilon {spent:.4g} and delta 0.001 for all that it releases" in sentence
    assert "class counts, standardisation, 3 evaluations): uploads are clipped" in sentence
    folder = read_report_runs([finished])[0].folder
    assert summarize_run(folder)["epsilon"] == spent
    print_run(folder)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"epsilon {spent:.4g} spent, of a budget of 60, at delta 0.001, for a client" in shown
    page = render_page(read_report_runs([finished]))
    for text in ("everything, so far", f"{guarantee['epsilon_alone']['evaluation']:.4g}", "The server is trusted"):
        assert text in page
    assert "No noise for differential privacy is added" not in page
    assert "Training rows of each group" not in page, "rows of clients are not released"
    assert "is not covered by the guarantee of this run" in page
    fingerprint = json.loads((finished / "environment.json").read_text())["data"]
    assert fingerprint not in page, "a hash of all rows would tell whether a guess at a client's rows is right"
    assert "the hash of all rows in environment.json" in guarantee["not_protected"][0]
    assert read_watched(finished)[0].epsilon == spent
    card = (finished / "MODEL_CARD.md").read_text()
    assert "## Privacy" in card
    assert "Training was not differentially private" not in card
    assert "Estimated from histograms of the test rows' scores with noise" in card
    assert "| training |" not in card, "the numbers of rows are not released"
