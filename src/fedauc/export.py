"""A saved model for other programs: ONNX, torch.export, safetensors or joblib, with the preparation of raw columns.

model.onnx         one input per raw column, `[rows, 1]`: numbers as float64 (NaN where missing), dates as float64 days
                   since 1970, categories as texts (empty where missing); outputs `score` and `probability`
model.pt2          a torch.export program of (numbers, codes), or of the model's inputs where there is no encoder
model.safetensors  the weights, with scorer.json as metadata
model.joblib       the `Scorer` itself, for Python programs that have fedauc
columns.json       beside model.pt2: the order of columns and the codes of categories
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedauc.data.columns import is_missing, read_columns, to_text
from fedauc.data.features import CategoryColumn, DateColumn, FeatureEncoder
from fedauc.discovery import lookup
from fedauc.files import write_atomically
from fedauc.scoring.calibration import Calibration, IsotonicCalibration, PlattCalibration
from fedauc.scoring.scorer import Scorer

OPSET = 20
"""The ONNX operator set that the model is written in; every runtime since 2024 reads it."""

ML_OPSET = 4
"""The version of ai.onnx.ml, which maps texts to codes."""

OUTPUTS = ("score", "probability")

INNER = "fedauc/"
"""Before every name inside an ONNX model, apart from its inputs and outputs."""


def export_scorer(scorer: Scorer, formats: Sequence[str], folder: str | Path) -> list[Path]:
    """Write the scorer in every given format into a folder, and return the files."""
    writers = [lookup("format", name, FORMATS) for name in formats]
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return [file for write_format in writers for file in write_format(scorer, path)]


class CalibrationModule(nn.Module):
    """A calibration as a network of float64: scores `[n]` to probabilities `[n]`."""

    slope: Tensor
    intercept: Tensor
    starts: Tensor
    widths: Tensor
    slopes: Tensor
    lowest: Tensor

    def __init__(self, calibration: Calibration) -> None:
        super().__init__()
        if isinstance(calibration, PlattCalibration):
            # Buffers keep float64, where constants of an ONNX model may become float32.
            self.register_buffer("slope", torch.tensor([calibration.slope], dtype=torch.float64))
            self.register_buffer("intercept", torch.tensor([calibration.intercept], dtype=torch.float64))
            return
        assert isinstance(calibration, IsotonicCalibration)
        knots, values = (torch.tensor(part, dtype=torch.float64) for part in (calibration.knots, calibration.values))
        self.register_buffer("starts", knots[:-1].clone())
        self.register_buffer("widths", knots.diff())
        self.register_buffer("slopes", values.diff() / knots.diff())
        self.register_buffer("lowest", values[:1].clone())

    def forward(self, scores: Tensor) -> Tensor:
        """The probabilities."""
        if hasattr(self, "slope"):
            return torch.sigmoid(self.slope * scores + self.intercept)
        # A piecewise linear curve is a sum of clipped ramps, one for each piece.
        ramps = torch.minimum((scores[:, None] - self.starts).clamp(min=0), self.widths)
        return self.lowest + (ramps * self.slopes).sum(1)


class ScoringModule(nn.Module):
    """The whole way from prepared columns to score and probability `[n]`, both float64."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.encoder = None if scorer.encoder is None else scorer.encoder.build_module()
        self.body = scorer.module
        self.calibration = CalibrationModule(scorer.calibration)
        self.dtype: torch.dtype = getattr(torch, scorer.input_dtype)
        # Not by `eval()`, which a module that torch.export has loaded refuses; its parts are in that mode already.
        self.training = False

    def forward(self, *columns: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers and codes where there is an encoder, and the model's inputs otherwise."""
        (inputs,) = columns if self.encoder is None else (self.encoder(*columns),)
        scores = self.body(inputs.to(self.dtype)).reshape(-1).double()
        return scores, self.calibration(scores)


def write_onnx(scorer: Scorer, folder: Path) -> list[Path]:
    """An ONNX model of raw columns, or of the model's inputs where there is no encoder."""
    with requiring_export("onnx", "onnxscript"):
        import onnx
        import onnxscript  # noqa: F401
    example, shapes = _example_inputs(scorer)
    names = ["inputs"] if scorer.encoder is None else ["numbers", "codes"]
    with _quiet_exporter(), explaining_failure("onnx"):
        program = torch.onnx.export(
            ScoringModule(scorer),
            example,
            dynamo=True,
            opset_version=OPSET,
            input_names=names,
            output_names=list(OUTPUTS),
            dynamic_shapes={"columns": shapes},
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    if scorer.encoder is not None:
        model = take_raw_columns(model, scorer.encoder)
    onnx.helper.set_model_props(model, {"scorer": json.dumps(scorer.to_document())})
    onnx.checker.check_model(model)
    file = folder / "model.onnx"
    write_atomically(file, model.SerializeToString())
    return [file]


def take_raw_columns(model: Any, encoder: FeatureEncoder) -> Any:
    """The ONNX model with one input per raw column instead of `numbers` and `codes`.

    Texts become codes by `LabelEncoder`, and the columns of one kind are concatenated.
    """
    from onnx import TensorProto, compose, helper

    clashes = set(OUTPUTS) & set(encoder.input_names)
    if clashes:
        name = min(clashes)
        raise ValueError(
            f"column {name!r} has the name of an output of the ONNX model; rename the column, and train again"
        )
    # Columns may have any name, so the names inside the model get a prefix.
    model = compose.add_prefix(model, INNER, rename_inputs=True, rename_outputs=False)
    inputs, nodes = list[Any](), list[Any]()
    sources: dict[str, list[str]] = {"numbers": [], "codes": []}
    for number, column in enumerate(encoder.columns):
        is_text = isinstance(column, CategoryColumn)
        kind = TensorProto.STRING if is_text else TensorProto.DOUBLE
        inputs.append(helper.make_tensor_value_info(column.name, kind, ["rows", 1]))
        if isinstance(column, CategoryColumn):
            codes, missing, other_code = _list_codes(column)
            coded = f"{INNER}codes_of_{number}"
            texts: dict[str, Any] = {
                "keys_strings": ["", *codes],
                "values_int64s": [missing, *codes.values()],
                "default_int64": other_code,
            }
            nodes.append(helper.make_node("LabelEncoder", [column.name], [coded], domain="ai.onnx.ml", **texts))
            sources["codes"].append(coded)
        else:
            sources["numbers"].append(column.name)
    for name, parts in sources.items():
        if parts:
            nodes.append(helper.make_node("Concat", parts, [f"{INNER}{name}"], axis=1))
    graph, inner_nodes = model.graph, list(model.graph.node)
    del graph.node[:], graph.input[:]
    graph.input.extend(inputs)
    graph.node.extend([*nodes, *inner_nodes])
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", ML_OPSET))
    return model


def make_onnx_inputs(encoder: FeatureEncoder, table: Any) -> dict[str, np.ndarray]:
    """The rows of a table as the inputs of `model.onnx`: `[rows, 1]` of float64, or of texts.

    Other programs do the same in a line per column; Python programs can call this.
    """
    numbers, _ = encoder.split_columns(table)
    texts = [column.name for column in encoder.columns if isinstance(column, CategoryColumn)]
    arrays = read_columns(table, texts)
    inputs, measured = dict[str, np.ndarray](), iter(numbers.T)
    for column in encoder.columns:
        if column.name in arrays:
            values = [None if is_missing(value) else to_text(value) for value in arrays[column.name].tolist()]
            inputs[column.name] = np.array([[text or ""] for text in values], dtype=object).reshape(-1, 1)
        else:
            inputs[column.name] = np.ascontiguousarray(next(measured)[:, None])
    return inputs


def write_pt2(scorer: Scorer, folder: Path) -> list[Path]:
    """A torch.export program with any number of rows, and the columns that it takes."""
    example, shapes = _example_inputs(scorer)
    with explaining_failure("pt2"):
        program = torch.export.export(ScoringModule(scorer), example, dynamic_shapes={"columns": shapes})
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    files = [folder / "model.pt2", folder / "columns.json"]
    write_atomically(files[0], buffer.getbuffer())
    write_atomically(files[1], (json.dumps(describe_columns(scorer), indent=2) + "\n").encode())
    return files


def write_safetensors(scorer: Scorer, folder: Path) -> list[Path]:
    """The weights, with scorer.json as metadata."""
    with requiring_export("safetensors"):
        from safetensors.torch import save
    weights = {name: tensor.clone().contiguous() for name, tensor in scorer.module.state_dict().items()}
    file = folder / "model.safetensors"
    write_atomically(file, save(weights, {"format": "pt", "scorer": json.dumps(scorer.to_document())}))
    return [file]


def write_joblib(scorer: Scorer, folder: Path) -> list[Path]:
    """The pickled scorer."""
    with requiring_export("joblib"):
        import joblib
    buffer = io.BytesIO()
    joblib.dump(scorer, buffer)
    file = folder / "model.joblib"
    write_atomically(file, buffer.getbuffer())
    return [file]


FORMATS: Mapping[str, Callable[[Scorer, Path], list[Path]]] = {
    "onnx": write_onnx,
    "pt2": write_pt2,
    "safetensors": write_safetensors,
    "joblib": write_joblib,
}
"""Every format and what writes it."""


def describe_columns(scorer: Scorer) -> dict[str, Any]:
    """The columns of `numbers` and of `codes` in their order, with the code of every category."""
    if scorer.encoder is None:
        return {"inputs": {"shape": list(scorer.input_shape), "dtype": scorer.input_dtype}}
    numbers, codes = list[dict[str, Any]](), list[dict[str, Any]]()
    for column in scorer.encoder.columns:
        if isinstance(column, CategoryColumn):
            texts, missing, other_code = _list_codes(column)
            codes.append({"name": column.name, "codes": texts, "missing": missing, "other": other_code})
        else:
            unit = "days since 1970-01-01" if isinstance(column, DateColumn) else "as in the table"
            numbers.append({"name": column.name, "unit": unit, "missing": "NaN"})
    return {"numbers": numbers, "codes": codes, "threshold": scorer.operating_point.threshold}


def _list_codes(column: CategoryColumn) -> tuple[dict[str, int], int, int]:
    """The code of every known text, of a missing value, and of any other text."""
    unknown = "\0"
    codes = column.look_up_codes(np.array([*column.values, None, unknown], dtype=object)).tolist()
    return dict(zip(column.values, codes, strict=False)), codes[-2], codes[-1]


@contextmanager
def requiring_export(*packages: str) -> Iterator[None]:
    """Turn a missing package into a message that says how to install it."""
    try:
        yield
    except ImportError:
        needed = " and ".join(packages)
        raise ValueError(f"this format needs {needed}: run pip install {' '.join(packages)}") from None


@contextmanager
def explaining_failure(name: str) -> Iterator[None]:
    """Turn an error of the exporter into one line; a module of one's own may do what it cannot follow."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"the model cannot be written as {name}: {reason}; use safetensors or joblib") from error


def _example_inputs(scorer: Scorer) -> tuple[tuple[Tensor, ...], tuple[dict[int, Any], ...]]:
    """Two rows to trace with, and which dimensions may vary."""
    rows = torch.export.Dim("rows", min=1)
    if scorer.encoder is None:
        return (torch.zeros((2, *scorer.input_shape), dtype=getattr(torch, scorer.input_dtype)),), ({0: rows},)
    categories = sum(isinstance(column, CategoryColumn) for column in scorer.encoder.columns)
    numbers = torch.zeros((2, len(scorer.encoder.columns) - categories), dtype=torch.float64)
    return (numbers, torch.zeros((2, categories), dtype=torch.int64)), ({0: rows}, {0: rows})


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """The exporter warns and logs about its own internals."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
