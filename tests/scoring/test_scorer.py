"""A saved model scores new rows with nothing but its folder."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedauc
from fedauc.data.datasets.creditcard import CreditCard
from fedauc.data.datasets.synthetic import Synthetic
from fedauc.data.example_table import encode_claims
from fedauc.data.preparation import Preparation, prepare_table
from fedauc.experiments.config import Config
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.runner import Run
from fedauc.models.mlp import MLP
from fedauc.scoring.calibration import fit_calibration
from fedauc.scoring.scorer import ReferenceRows, make_scorer
from fedauc.scoring.thresholds import choose_by_fpr, choose_by_recall
from own_members import OwnModel
from small_scorers import draw_table, make_small_scorer


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on synthetic arrays, which has validation rows but no encoder."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    recipe = Recipe.of("cycp-pairwise", cycles=2, groups=2, local_steps=2)
    config = Config(recipe=recipe, data=Synthetic(clients=4, rows_per_client=60), model=MLP(hidden=(4,)))
    Run.create(config, folder).train_to_end()
    return folder


def test_the_model_of_a_run_gives_the_scores_of_the_run(run_folder: Path) -> None:
    data = Synthetic(clients=4, rows_per_client=60)
    stored = np.load(run_folder / "scores.npz")
    scorer = fedauc.load(run_folder)
    np.testing.assert_array_equal(scorer.scores(data.load(0).test.inputs), stored["scores"])


def test_calibration_and_threshold_of_a_run_come_from_its_validation_rows(run_folder: Path) -> None:
    scorer = fedauc.load(run_folder)
    validation = prepare_table(Synthetic(clients=4, rows_per_client=60).load(0), Preparation(), 0).validation
    assert validation is not None
    labels, scores = validation.labels.numpy(), scorer.scores(validation.inputs)
    assert scorer.calibrated_on == "validation"
    assert scorer.operating_point == choose_by_fpr(labels, scores, 0.01)
    assert scorer.calibration == fit_calibration(labels, scores, validation.clients)
    assert "Platt scaling of the validation rows" in (run_folder / "MODEL_CARD.md").read_text()


def test_a_run_without_validation_rows_is_calibrated_on_its_training_rows_and_says_so(tmp_path: Path) -> None:
    recipe = Recipe.of("cycp-pairwise", cycles=1, local_steps=1)
    Run.create(Config(recipe=recipe), tmp_path / "run").train_to_end()
    scorer = fedauc.load(tmp_path / "run")
    rows = CreditCard().read_rows()
    reference = scorer.require_reference()
    assert (scorer.calibrated_on, reference.part) == ("training", "training")
    assert len(reference.labels) == len(rows.labels) - len(np.load(tmp_path / "run" / "scores.npz")["labels"])
    assert "There were no validation rows" in (tmp_path / "run" / "MODEL_CARD.md").read_text()
    # The encoder standardises raw rows, as the run has done.
    stored = np.load(tmp_path / "run" / "scores.npz")
    raw = np.asarray(rows.inputs)[stored["rows"]]
    np.testing.assert_array_equal(scorer.scores(raw), stored["scores"])
    columns = dict(zip(scorer.feature_names, raw.T, strict=True))
    np.testing.assert_array_equal(scorer.scores(dict(reversed(columns.items()))), stored["scores"])


def test_a_saved_scorer_is_the_same_when_it_is_loaded(tmp_path: Path) -> None:
    scorer, table = make_small_scorer("isotonic"), draw_table(50, seed=1)
    scorer.save(tmp_path / "model")
    loaded = fedauc.load(tmp_path / "model")
    for before, after in zip(scorer.score_rows(table), loaded.score_rows(table), strict=True):
        np.testing.assert_array_equal(before, after)
    assert loaded.to_document() == scorer.to_document()
    np.testing.assert_array_equal(loaded.require_reference().clients, scorer.require_reference().clients)


def test_probabilities_are_calibrated_and_decisions_are_labels_of_the_file() -> None:
    scorer, table = make_small_scorer(), draw_table(200, seed=2)
    scores, probabilities, alerts = scorer.score_rows(table)
    np.testing.assert_array_equal(scorer.predict_proba(table), np.stack([1 - probabilities, probabilities], 1))
    np.testing.assert_array_equal(probabilities, scorer.calibration.probabilities(scores))
    np.testing.assert_array_equal(scorer.predict(table), np.where(alerts, "yes", "no"))
    np.testing.assert_array_equal(alerts, scores >= scorer.operating_point.threshold)
    assert 0 < alerts.mean() < 0.2


def test_labels_that_are_whole_numbers_are_predicted_as_numbers(run_folder: Path) -> None:
    predicted = fedauc.load(run_folder).predict(np.zeros((3, 10)))
    assert predicted.dtype.kind == "i"


def test_no_rows_have_no_scores() -> None:
    scorer = make_small_scorer()
    assert scorer.scores({name: [] for name in scorer.feature_names}).shape == (0,)
    assert scorer.predict_proba({name: [] for name in scorer.feature_names}).shape == (0, 2)


def test_another_threshold_and_calibration_can_be_stored(tmp_path: Path) -> None:
    make_small_scorer().save(tmp_path)
    scorer = fedauc.load(tmp_path)
    rows = scorer.require_reference()
    point = choose_by_recall(rows.labels, rows.scores, 0.8)
    scorer.with_operating_point(point).with_calibration("isotonic").save_decision(tmp_path)
    changed = fedauc.load(tmp_path)
    assert changed.operating_point == point
    assert changed.calibration == fit_calibration(rows.labels, rows.scores, rows.clients, "isotonic")


def test_a_fitted_module_of_ones_own_is_saved_without_its_class(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    inputs = draws.normal(size=(200, 3)).astype(np.float32)
    labels = (inputs[:, 0] + draws.normal(size=200) > 1).astype(np.int8)
    clients = fedauc.Clients.from_arrays(inputs, labels, np.arange(200) % 4)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    held_out = fedauc.examples(inputs[:80], labels[:80], np.arange(80) % 4)
    fitted = fedauc.fit(module, clients, cycles=2, groups=2, test=held_out, validation=held_out)
    saved = fitted.save(tmp_path / "model", calibration="isotonic")
    loaded = fedauc.load(tmp_path / "model")
    assert saved.calibrated_on == "validation"
    for rows in (1, 2, 200):
        np.testing.assert_allclose(loaded.scores(inputs[:rows]), fitted.scores(inputs[:rows]), atol=1e-6)
    loaded.save(tmp_path / "copy")
    np.testing.assert_array_equal(fedauc.load(tmp_path / "copy").scores(inputs), loaded.scores(inputs))
    card = (tmp_path / "model" / "MODEL_CARD.md").read_text()
    assert "cycp-pairwise with Sequential" in card
    assert f"{fitted.history[-1][1].auc:.4f}" in card


def test_a_model_that_was_fitted_on_a_table_is_saved_with_its_columns_and_labels(tmp_path: Path) -> None:
    (tmp_path / "claims.csv").write_bytes(encode_claims(400, seed=0))
    table = fedauc.Table(str(tmp_path / "claims.csv"), label="fraud", positive="yes", client="state")
    fitted = fedauc.fit(MLP(hidden=(4,)), table, cycles=1, local_steps=1)
    fitted.save(tmp_path / "model")
    loaded = fedauc.load(tmp_path / "model")
    frame = pd.read_csv(tmp_path / "claims.csv")
    np.testing.assert_array_equal(loaded.scores(frame), fitted.scores(frame))
    assert set(loaded.predict(frame)) <= {"no", "yes"}
    assert loaded.model == MLP(hidden=(4,))
    assert "claims.csv" in (tmp_path / "model" / "MODEL_CARD.md").read_text()


def test_a_model_of_a_frame_of_numbers_finds_its_columns_by_name(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    frame = pd.DataFrame(draws.normal(size=(60, 2)), columns=["weight", "height"])
    frame["y"], frame["site"] = np.arange(60) % 3 == 0, np.arange(60) % 4
    clients = fedauc.Clients.from_frame(frame, "y", "site")
    fitted = fedauc.fit("linear", clients, cycles=1, groups=2, local_steps=1)
    fitted.save(tmp_path)
    loaded = fedauc.load(tmp_path)
    assert loaded.feature_names == ("weight", "height")
    np.testing.assert_array_equal(loaded.scores(frame[["height", "weight"]]), fitted.scores(frame))
    with pytest.raises(ValueError, match="height"):
        loaded.scores(frame[["weight"]])


def test_a_model_of_a_plugin_is_found_again_by_its_module(tmp_path: Path) -> None:
    fedauc.register(OwnModel)
    model = OwnModel()
    module = model.build((3,), 0)
    rows = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    reference = ReferenceRows("training", np.arange(50) % 2, module(rows).detach().double().numpy().ravel())
    make_scorer(module, model, rows[:1], reference).save(tmp_path)
    assert json.loads((tmp_path / "scorer.json").read_text())["plugin"] == "own_members"
    np.testing.assert_array_equal(fedauc.load(tmp_path).scores(rows), reference.scores)


def test_a_scorer_can_be_pickled() -> None:
    scorer, table = make_small_scorer(), draw_table(20)
    copied = pickle.loads(pickle.dumps(scorer))
    np.testing.assert_array_equal(copied.scores(table), scorer.scores(table))


def test_rows_that_do_not_fit_are_refused_in_one_line(run_folder: Path) -> None:
    scorer = fedauc.load(run_folder)
    with pytest.raises(ValueError, match=r"rows have shape \(9,\); the model was trained on rows of shape \(10,\)"):
        scorer.scores(np.zeros((2, 9)))
    table = draw_table(3)
    del table["state"]
    with pytest.raises(ValueError, match="state"):
        make_small_scorer().scores(table)


def test_floats_are_refused_by_a_model_of_bytes() -> None:
    model = MLP(hidden=())
    module = model.build((4,), 0)
    images = torch.arange(40, dtype=torch.uint8).reshape(10, 4)
    reference = ReferenceRows("training", np.arange(10) % 2, module(images).detach().double().numpy().ravel())
    scorer = make_scorer(module, model, images[:1], reference)
    np.testing.assert_array_equal(scorer.scores(images), reference.scores)
    with pytest.raises(ValueError, match="rows are float32; the model was trained on uint8: convert them"):
        scorer.scores(images.float())


def test_a_folder_without_a_scorer_says_what_to_do(tmp_path: Path) -> None:
    def explain(folder: Path) -> str:
        with pytest.raises(ValueError) as error:
            fedauc.load(folder)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "does not exist; give the folder of a finished run" in explain(tmp_path / "nowhere")
    assert "has no scorer.json; give the folder of a finished run" in explain(tmp_path)
    (tmp_path / "federation.json").write_text("{}")
    assert "is a run of a real federation" in explain(tmp_path)
    (tmp_path / "federation.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    assert f"is not finished; go on with `fedauc resume {tmp_path}`" in explain(tmp_path)
    (tmp_path / "result.json").write_text("{}")
    assert f"train it again with `fedauc run --config {tmp_path / 'config.json'} --out NEW`" in explain(tmp_path)
    (tmp_path / "comparison.json").write_text("{}")
    make_small_scorer().save(tmp_path / "cycp-fedavg" / "seed-0")
    assert f"give the folder of one of them, such as {tmp_path / 'cycp-fedavg' / 'seed-0'}" in explain(tmp_path)


def test_damaged_files_are_noticed(tmp_path: Path) -> None:
    make_small_scorer().save(tmp_path)
    weights = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "model.pt").write_bytes(weights + b"x")
    with pytest.raises(ValueError, match=r"model\.pt is not the file that scorer\.json was written with"):
        fedauc.load(tmp_path)
    (tmp_path / "model.pt").unlink()
    with pytest.raises(ValueError, match=r"model\.pt is missing; copy both files again"):
        fedauc.load(tmp_path)
    document = json.loads((tmp_path / "scorer.json").read_text())
    (tmp_path / "scorer.json").write_text(json.dumps(document | {"format": 99}))
    with pytest.raises(ValueError, match="has format 99; this version reads format 1"):
        fedauc.load(tmp_path)
    del document["model_sha256"]
    (tmp_path / "scorer.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"scorer\.json lacks 'model_sha256', so it is damaged or of another version"):
        fedauc.load(tmp_path)
    (tmp_path / "scorer.json").write_text("{")
    with pytest.raises(ValueError, match=r"scorer\.json is damaged"):
        fedauc.load(tmp_path)


def test_thresholds_need_the_reference_scores(tmp_path: Path) -> None:
    make_small_scorer().save(tmp_path)
    (tmp_path / "reference_scores.npz").unlink()
    scorer = fedauc.load(tmp_path)
    assert len(scorer.scores(draw_table(3))) == 3
    with pytest.raises(ValueError, match=r"the model has no reference_scores\.npz"):
        scorer.with_calibration("isotonic")
