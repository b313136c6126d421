"""Exported models give the scores and probabilities of the scorer, from raw columns."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import onnxruntime
import pytest
import torch
from safetensors import safe_open

import fedauc
from fedauc.data.features import CategoryColumn, FeatureColumn, FeatureEncoder, NumberColumn
from fedauc.export import CalibrationModule, export_scorer, make_onnx_inputs
from fedauc.models.mlp import MLP
from fedauc.models.tabular import Tabular
from fedauc.scoring.calibration import CALIBRATIONS
from fedauc.scoring.scorer import ReferenceRows, Scorer, make_scorer
from small_scorers import draw_table, make_small_scorer


def make_scorer_of(encoder: FeatureEncoder, table: Any, model: Any = MLP(hidden=(4,))) -> Scorer:  # noqa: B008
    inputs = torch.from_numpy(encoder.encode(table))
    module = model.build((inputs.shape[1],), 0).eval()
    scores = module(inputs).detach().double().numpy().ravel()
    labels = (scores > np.median(scores)).astype(np.int8)
    return make_scorer(module, model, inputs[:1], ReferenceRows("training", labels, scores), encoder)


def run_onnx(file: Path, inputs: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    session = onnxruntime.InferenceSession(file)
    score, probability = session.run(["score", "probability"], inputs)
    return score, probability


def check_onnx(scorer: Scorer, folder: Path, *tables: Any) -> Path:
    """Export, and compare with onnxruntime to 1e-5."""
    (file,) = export_scorer(scorer, ["onnx"], folder)
    assert scorer.encoder is not None
    for table in tables:
        score, probability = run_onnx(file, make_onnx_inputs(scorer.encoder, table))
        expected = scorer.score_rows(table)
        np.testing.assert_allclose(score, expected.scores, atol=1e-5)
        np.testing.assert_allclose(probability, expected.probabilities, atol=1e-5)
    return file


def test_onnx_takes_raw_columns_with_gaps_unseen_categories_and_dates(tmp_path: Path) -> None:
    scorer = make_small_scorer()
    file = check_onnx(scorer, tmp_path, draw_table(300, seed=7), draw_table(1, seed=8))
    session = onnxruntime.InferenceSession(file)
    kinds = {argument.name: argument.type for argument in session.get_inputs()}
    assert kinds == {
        "age": "tensor(double)",
        "state": "tensor(string)",
        "day": "tensor(double)",
        "flag": "tensor(string)",
    }
    # What another program would write by hand: an unseen state, a missing flag, 1971-05-04 as days since 1970.
    row = {"age": [[37.5]], "state": [["TX"]], "day": [[488.0]], "flag": [[""]]}
    arrays = {
        name: np.array(value, dtype=object if name in ("state", "flag") else np.float64) for name, value in row.items()
    }
    table = {"age": [37.5], "state": ["TX"], "day": ["1971-05-04"], "flag": [None]}
    np.testing.assert_allclose(run_onnx(file, arrays)[0], scorer.scores(table), atol=1e-5)
    stored = json.loads(session.get_modelmeta().custom_metadata_map["scorer"])
    assert stored["operating_point"]["threshold"] == scorer.operating_point.threshold


@pytest.mark.slow
def test_onnx_of_isotonic_probabilities(tmp_path: Path) -> None:
    check_onnx(make_small_scorer("isotonic"), tmp_path, draw_table(300, seed=7))


@pytest.mark.slow
def test_onnx_of_the_tabular_model(tmp_path: Path) -> None:
    table = draw_table(100, seed=3)
    encoder = make_small_scorer().encoder
    assert encoder is not None
    check_onnx(make_scorer_of(encoder, table, Tabular()), tmp_path, table)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["numbers", "indicators", "categories", "odd names"])
def test_onnx_of_columns_of_one_kind(kind: str, tmp_path: Path) -> None:
    table: dict[str, Any] = {"numbers": [1.0, np.nan, 3.0], "val_0": ["x", "y", None]}
    columns: dict[str, tuple[FeatureColumn, ...]] = {
        "numbers": (NumberColumn("numbers", 1, 1, 2),),
        "indicators": (NumberColumn("numbers", 1, 1, 2, has_indicator=True),),
        "categories": (CategoryColumn("val_0", ("x", "y"), has_missing=True),),
        # These are names that the exporter uses itself.
        "odd names": (NumberColumn("numbers", 1, 1, 2), CategoryColumn("val_0", ("x",), has_other=True)),
    }
    check_onnx(make_scorer_of(FeatureEncoder(columns[kind]), table), tmp_path, table)


@pytest.mark.slow
def test_onnx_of_a_model_of_arrays_takes_its_inputs(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    model = MLP(hidden=(4,))
    module = model.build((3,), 0)
    reference = ReferenceRows(
        "training", np.arange(20) % 2, module(torch.from_numpy(rows)).detach().double().numpy()[:, 0]
    )
    scorer = make_scorer(module, model, torch.from_numpy(rows[:1]), reference)
    (file,) = export_scorer(scorer, ["onnx"], tmp_path)
    score, probability = run_onnx(file, {"inputs": rows})
    np.testing.assert_allclose(score, scorer.scores(rows), atol=1e-5)
    np.testing.assert_allclose(probability, scorer.predict_proba(rows)[:, 1], atol=1e-5)


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_the_calibration_of_an_exported_model_is_that_of_the_scorer(name: str) -> None:
    calibration = make_small_scorer(name).calibration
    scores = np.linspace(-5, 5, 1001)
    probabilities = CalibrationModule(calibration)(torch.from_numpy(scores)).numpy()
    np.testing.assert_allclose(probabilities, calibration.probabilities(scores), atol=1e-12)


def test_pt2_takes_any_number_of_rows_and_its_columns_are_described(tmp_path: Path) -> None:
    scorer = make_small_scorer()
    program, columns = export_scorer(scorer, ["pt2"], tmp_path)
    module = torch.export.load(program).module()
    described = json.loads(columns.read_text())
    for rows in (1, 2, 50):
        table = draw_table(rows, seed=rows)
        numbers = np.stack([table["age"], np.array([_days(day) for day in table["day"]])], axis=1)
        codes = np.stack([_look_up(table[entry["name"]], entry) for entry in described["codes"]], axis=1)
        score, probability = module(torch.from_numpy(numbers), torch.from_numpy(codes))
        np.testing.assert_allclose(score.numpy(), scorer.scores(table), atol=1e-5)
        np.testing.assert_allclose(probability.numpy(), scorer.predict_proba(table)[:, 1], atol=1e-5)
    assert [entry["name"] for entry in described["numbers"]] == ["age", "day"]


def _days(day: str | None) -> float:
    return np.nan if day is None else float((np.datetime64(day) - np.datetime64("1970-01-01")) / np.timedelta64(1, "D"))


def _look_up(values: Any, entry: dict[str, Any]) -> np.ndarray:
    texts = [None if value is None else str(value).lower() if isinstance(value, bool) else value for value in values]
    return np.array([entry["missing"] if text is None else entry["codes"].get(text, entry["other"]) for text in texts])


def test_pt2_of_columns_of_one_kind_with_isotonic_probabilities(tmp_path: Path) -> None:
    """No indicators, bins, dates or numbers: torch.export cannot save the empty tensors that these would have."""
    table = {"state": ["CA", "NY", None, "TX"]}
    scorer = make_scorer_of(FeatureEncoder((CategoryColumn("state", ("CA", "NY")),)), table)
    scorer = scorer.with_calibration("isotonic")
    program, _ = export_scorer(scorer, ["pt2"], tmp_path)
    assert scorer.encoder is not None
    inputs = [torch.from_numpy(part) for part in scorer.encoder.split_columns(table)]
    score, probability = torch.export.load(program).module()(*inputs)
    np.testing.assert_allclose(score, scorer.scores(table), atol=1e-6)
    np.testing.assert_allclose(probability, scorer.predict_proba(table)[:, 1], atol=1e-6)


def test_a_module_of_ones_own_is_exported_after_it_was_loaded(tmp_path: Path) -> None:
    rows = torch.arange(12.0).reshape(6, 2)
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    scores = module(rows).detach().double().numpy()[:, 0]
    make_scorer(module, None, rows[:1], ReferenceRows("training", np.arange(6) % 2, scores)).save(tmp_path / "model")
    program, _, weights = export_scorer(fedauc.load(tmp_path / "model"), ["pt2", "safetensors"], tmp_path)
    np.testing.assert_allclose(torch.export.load(program).module()(rows)[0], scores, atol=1e-6)
    assert weights.is_file()


def test_safetensors_hold_the_weights_and_the_description(tmp_path: Path) -> None:
    scorer = make_small_scorer()
    (file,) = export_scorer(scorer, ["safetensors"], tmp_path)
    with safe_open(file, "pt") as stored:
        metadata = stored.metadata()
        weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    assert json.loads(metadata["scorer"]) == json.loads(json.dumps(scorer.to_document()))
    expected = scorer.module.state_dict()
    assert set(weights) == set(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def test_joblib_holds_the_scorer(tmp_path: Path) -> None:
    scorer, table = make_small_scorer(), draw_table(20)
    (file,) = export_scorer(scorer, ["joblib"], tmp_path)
    np.testing.assert_array_equal(joblib.load(file).scores(table), scorer.scores(table))


def test_what_cannot_be_exported_is_refused_in_one_line(tmp_path: Path) -> None:
    scorer = make_small_scorer()
    with pytest.raises(ValueError, match="unknown format 'tflite'"):
        export_scorer(scorer, ["onnx", "tflite"], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "packages"), [("onnx", "onnx onnxscript"), ("safetensors", "safetensors"), ("joblib", "joblib")]
)
def test_a_missing_package_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, packages: str
) -> None:
    for module in ("onnx", "safetensors.torch", "joblib"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"run pip install {packages}$"):
        export_scorer(make_small_scorer(), [name], tmp_path)


@pytest.mark.slow
def test_a_column_with_the_name_of_an_output_is_refused(tmp_path: Path) -> None:
    table = {"score": [1.0, 2.0, 3.0]}
    scorer = make_scorer_of(FeatureEncoder((NumberColumn("score"),)), table)
    with pytest.raises(ValueError, match="column 'score' has the name of an output of the ONNX model"):
        export_scorer(replace(scorer), ["onnx"], tmp_path)
