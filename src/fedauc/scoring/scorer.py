"""A trained model that scores new rows with nothing but its folder.

scorer.json           the model's configuration, the encoder of raw columns, the calibration and the operating point
model.pt              the weights; of a module that is no model of the library, a torch.export program in model.pt2
reference_scores.npz  labels, scores and clients of the rows that calibration and thresholds come from
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedauc import plugins
from fedauc.data.checks import as_inputs
from fedauc.data.columns import is_missing, select_features, to_text
from fedauc.data.features import FeatureEncoder
from fedauc.discovery import lookup
from fedauc.files import naming_damage, write_atomically
from fedauc.metrics.ranks import to_numpy
from fedauc.models import find_models
from fedauc.models.model import ModelConfig
from fedauc.scoring.calibration import Calibration, fit_calibration, read_calibration
from fedauc.scoring.thresholds import OperatingPoint, choose_by_fpr
from fedauc.scoring.unusual_columns import ColumnRange
from fedauc.version import VERSION

FORMAT = 1
"""Raised when an old reader could misunderstand a new scorer.json."""

SCORER_FILE, REFERENCE_FILE = "scorer.json", "reference_scores.npz"

BLOCK = 8192
"""How many rows are scored at once."""

Part = Literal["validation", "training", "site's training"]
"""The rows that calibration and thresholds come from; in a real federation they are those of one site."""


class ReferenceRows(NamedTuple):
    """The rows that calibration and thresholds come from: validation rows where there are some, never test rows."""

    part: Part
    labels: np.ndarray
    scores: np.ndarray
    clients: np.ndarray | None = None


class ScoredRows(NamedTuple):
    """What a scorer says about rows, `[n]` each: raw score, probability of a positive, and whether it is an alert."""

    scores: np.ndarray
    probabilities: np.ndarray
    alerts: np.ndarray


@dataclass(frozen=True)
class Scorer:
    """From the columns of a raw table to scores, calibrated probabilities and decisions.

    `model` builds the module, or is None where the module is the user's own. `input_dtype` is the type that the module
    takes, and `input_shape` that of a row of its inputs. Without an encoder, rows are arrays of that shape, or tables
    with the columns `column_names`. `ranges` are those that the sites of a federation have agreed on.
    """

    module: nn.Module
    model: ModelConfig | None
    input_shape: tuple[int, ...]
    input_dtype: str
    calibration: Calibration
    operating_point: OperatingPoint
    calibrated_on: Part
    encoder: FeatureEncoder | None = None
    label_values: tuple[str, str] = ("0", "1")
    reference: ReferenceRows | None = None
    column_names: tuple[str, ...] = ()
    ranges: tuple[ColumnRange, ...] = ()

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The columns that a table needs; empty for models of arrays and images."""
        return self.column_names if self.encoder is None else self.encoder.input_names

    @property
    def classes(self) -> np.ndarray:
        """The negative and the positive label, as numbers where both are whole numbers."""
        try:
            return np.array([int(value) for value in self.label_values])
        except ValueError:
            return np.array(self.label_values)

    def scores(self, table: Any) -> np.ndarray:
        """Raw scores `[n]` of the rows of a table: a frame, a mapping of columns, or an array."""
        inputs = self._encode_rows(table)
        if self.model is not None and len(inputs):
            self.model.check_inputs(inputs)
        dtype = getattr(torch, self.input_dtype)
        with torch.no_grad():
            parts = [self.module(part.to(dtype)).reshape(len(part)) for part in torch.split(inputs, BLOCK) if len(part)]
        return np.concatenate([np.zeros(0), *(part.double().cpu().numpy() for part in parts)])

    def score_rows(self, table: Any) -> ScoredRows:
        """Scores, probabilities and alerts in one pass."""
        scores = self.scores(table)
        return ScoredRows(scores, self.calibration.probabilities(scores), scores >= self.operating_point.threshold)

    def predict_proba(self, table: Any) -> np.ndarray:
        """Calibrated probabilities `[n, 2]` of the negative and of the positive class."""
        positive = self.calibration.probabilities(self.scores(table))
        return np.stack([1 - positive, positive], axis=1)

    def predict(self, table: Any) -> np.ndarray:
        """The label of each row, in the label's own values: positive where the score reaches the threshold."""
        predicted: np.ndarray = self.classes[self.score_rows(table).alerts.astype(np.int64)]
        return predicted

    def with_operating_point(self, point: OperatingPoint) -> Scorer:
        """The same scorer with another threshold."""
        return replace(self, operating_point=point)

    def with_calibration(self, name: str) -> Scorer:
        """The same scorer with another calibration of the same rows."""
        rows = self.require_reference()
        return replace(self, calibration=fit_calibration(rows.labels, rows.scores, rows.clients, name))

    def require_reference(self) -> ReferenceRows:
        """The rows that thresholds are chosen on; their file may have been left out when a model was copied."""
        if self.reference is None:
            remedy = "copy it from the folder of the run"
            raise ValueError(f"the model has no {REFERENCE_FILE}, which thresholds are chosen on; {remedy}")
        return self.reference

    def save(self, folder: str | Path) -> None:
        """Write the scorer's files into a folder, which is made where there is none."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        content = _encode_weights(self.module) if self.model is not None else export_module(self)
        write_atomically(path / self._model_file, content)
        if self.reference is not None:
            write_atomically(path / REFERENCE_FILE, _encode_reference(self.reference))
        document = self.to_document() | {"model_sha256": hashlib.sha256(content).hexdigest()}
        self._write_document(path, document)

    def save_decision(self, folder: Path) -> None:
        """Write the calibration and the operating point into a folder that has this scorer already."""
        stored = _read_document(folder)
        self._write_document(folder, stored | self._describe_decision())

    def to_document(self) -> dict[str, Any]:
        """Plain values for JSON, without the weights."""
        weights = next((parameter.dtype for parameter in self.module.parameters()), torch.float32)
        return {
            "format": FORMAT,
            "fedauc": VERSION,
            **_describe_model(self.model),
            "model_file": self._model_file,
            "input_shape": list(self.input_shape),
            "input_dtype": self.input_dtype,
            "dtype": str(weights).removeprefix("torch."),
            "label_values": list(self.label_values),
            "encoder": None if self.encoder is None else self.encoder.to_document(),
            "column_names": list(self.column_names),
            "ranges": [asdict(column) for column in self.ranges],
            **self._describe_decision(),
        }

    def _describe_decision(self) -> dict[str, Any]:
        return {
            "calibrated_on": self.calibrated_on,
            "calibration": self.calibration.to_document(),
            "operating_point": self.operating_point.to_document(),
        }

    @property
    def _model_file(self) -> str:
        return "model.pt2" if self.model is None else "model.pt"

    def _write_document(self, folder: Path, document: Mapping[str, Any]) -> None:
        text = json.dumps(document, indent=2, allow_nan=False)
        write_atomically(folder / SCORER_FILE, f"{text}\n".encode())

    def _encode_rows(self, table: Any) -> Tensor:
        """The model's inputs; rows of another shape, or floats for a model of integers, are refused."""
        if self.encoder is None:
            inputs = as_inputs(select_features(table, self.column_names))
        else:
            inputs = torch.from_numpy(self.encoder.encode(table))
        if tuple(inputs.shape[1:]) != self.input_shape:
            shape = tuple(inputs.shape[1:])
            raise ValueError(f"rows have shape {shape}; the model was trained on rows of shape {self.input_shape}")
        expects_integers = not getattr(torch, self.input_dtype).is_floating_point
        if expects_integers and inputs.is_floating_point():
            dtype = str(inputs.dtype).removeprefix("torch.")
            raise ValueError(f"rows are {dtype}; the model was trained on {self.input_dtype}: convert them")
        return inputs


def make_scorer(
    module: nn.Module,
    model: ModelConfig | None,
    example: Tensor,
    reference: ReferenceRows,
    encoder: FeatureEncoder | None = None,
    label_values: tuple[str, str] = ("0", "1"),
    calibration: str = "platt",
) -> Scorer:
    """A scorer with the default operating point; `example` is one row `[1, ...]` as the module takes it."""
    return Scorer(
        module.cpu().eval().requires_grad_(False),
        model,
        tuple(example.shape[1:]),
        str(example.dtype).removeprefix("torch."),
        fit_calibration(reference.labels, reference.scores, reference.clients, calibration),
        choose_by_fpr(reference.labels, reference.scores),
        reference.part,
        encoder,
        label_values,
        reference,
    )


def load(folder: str | Path) -> Scorer:
    """The scorer of a finished run, or of `Fitted.save`, from its folder alone."""
    path = Path(folder)
    with naming_damage(path):
        try:
            return _read_scorer(path, _read_document(path))
        except KeyError as error:
            remedy = "save the model again with this version"
            raise ValueError(
                f"{path / SCORER_FILE} lacks {error}, so it is damaged or of another version: {remedy}"
            ) from error


def _read_scorer(path: Path, document: Mapping[str, Any]) -> Scorer:
    """The scorer that a document describes, with its model beside it."""
    file = path / document["model_file"]
    content = file.read_bytes() if file.is_file() else b""
    digest = hashlib.sha256(content).hexdigest()
    if digest != document["model_sha256"]:
        problem = "is missing" if not content else "is not the file that scorer.json was written with"
        raise ValueError(f"{file} {problem}; copy both files again from the folder of the run")
    shape = tuple(document["input_shape"])
    model = _read_model(document, path / SCORER_FILE)
    module = _load_program(content) if model is None else _load_weights(model, shape, document["dtype"], content)
    encoder = document["encoder"]
    return Scorer(
        module,
        model,
        shape,
        document["input_dtype"],
        read_calibration(document["calibration"]),
        OperatingPoint.from_document(document["operating_point"]),
        document["calibrated_on"],
        None if encoder is None else FeatureEncoder.from_document(encoder),
        tuple(document["label_values"]),
        _read_reference(path / REFERENCE_FILE, document["calibrated_on"]),
        tuple(document["column_names"]),
        tuple(ColumnRange(**column) for column in document.get("ranges", [])),
    )


def match_labels(values: Sequence[Any], label_values: tuple[str, str], may_be_missing: bool = True) -> np.ndarray:
    """Labels as a table writes them as 0 and 1, and -1 where one is missing; other values are refused.

    The refusal advises leaving a label empty only where one may be missing.

    >>> match_labels(["yes", "no", None, "no"], ("no", "yes"))
    array([ 1,  0, -1,  0])
    """
    negative, positive = map(_normalize_label, label_values)
    # Where the positive class stands against several others, they have no name of their own.
    takes_any_other = negative == f"not {positive}"
    labels = np.full(len(values), -1)
    for row, value in enumerate(values):
        if is_missing(value):
            continue
        text = _normalize_label(value)
        if text not in (negative, positive) and not takes_any_other:
            known = " nor ".join(map(repr, label_values))
            remedy = "correct it, or leave it empty" if may_be_missing else "correct it"
            raise ValueError(f"label {str(value)!r} in row {row} is neither {known}; {remedy}")
        labels[row] = text == positive
    return labels


def _normalize_label(value: Any) -> str | None:
    """One text for `1`, `1.0` and 1, and for `True`, `true` and True."""
    text = to_text(value)
    try:
        return to_text(float(text or ""))
    except ValueError:
        return text.lower() if text and text.lower() in ("true", "false") else text


def export_module(scorer: Scorer) -> bytes:
    """The scorer's module as a torch.export program, which needs no Python class to be loaded."""
    example = torch.zeros((2, *scorer.input_shape), dtype=getattr(torch, scorer.input_dtype))
    try:
        program = torch.export.export(scorer.module, (example,), dynamic_shapes=({0: torch.export.Dim("rows", min=1)},))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        remedy = "build it as a model of the library (docs/adding_things.md), whose configuration is saved instead"
        raise ValueError(
            f"torch.export cannot save the module {type(scorer.module).__name__}: {reason}; {remedy}"
        ) from error
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _encode_weights(module: nn.Module) -> bytes:
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    return buffer.getvalue()


def _load_weights(model: ModelConfig, shape: tuple[int, ...], dtype: str, content: bytes) -> nn.Module:
    module = model.build(shape, seed=0).to(getattr(torch, dtype))
    module.load_state_dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    return module.eval().requires_grad_(False)


def _load_program(content: bytes) -> nn.Module:
    return torch.export.load(io.BytesIO(content)).module()


def _encode_reference(rows: ReferenceRows) -> bytes:
    arrays = {"labels": rows.labels.astype(np.int8), "scores": rows.scores}
    if rows.clients is not None:
        arrays["clients"] = to_numpy(rows.clients).astype(str)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def _read_reference(path: Path, part: Part) -> ReferenceRows | None:
    if not path.is_file():
        return None
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
        clients = stored.get("clients")
        return ReferenceRows(part, stored["labels"], stored["scores"], clients)


def _describe_model(model: ModelConfig | None) -> dict[str, Any]:
    """The model's name, fields, and plug-in if it has one."""
    if model is None:
        return {"model": None}
    module = plugins.plugin_of_class(type(model))
    fields = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(model).items()}
    return {"model": {"name": model.name, **fields}, **({"plugin": module} if module else {})}


def _read_model(document: Mapping[str, Any], where: Path) -> ModelConfig | None:
    if document["model"] is None:
        return None
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in document["model"].items()
    }
    name, plugin = fields.pop("name"), document.get("plugin")
    if plugin and name not in find_models():
        try:
            plugins.import_plugin(plugin)
        except ValueError as error:
            raise ValueError(f"{where} needs the model {name!r} of the plug-in {plugin!r}: {error}") from error
    model: ModelConfig = lookup("model", name, find_models())(**fields)
    return model


def _read_document(folder: Path) -> dict[str, Any]:
    """scorer.json, or one line that says why there is none."""
    file = folder / SCORER_FILE
    if not file.is_file():
        raise ValueError(_explain_absence(folder))
    try:
        document: Any = json.loads(file.read_text(encoding="utf-8"))
        written = document.get("format")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: {error}; copy it again from the folder of the run") from error
    if written != FORMAT:
        raise ValueError(
            f"{file} has format {written}; this version reads format {FORMAT}: use the fedauc that wrote it"
        )
    return dict(document)


def _explain_absence(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} does not exist; give the folder of a finished run"
    if (folder / "comparison.json").is_file():
        runs = sorted(path.parent.relative_to(folder).as_posix() for path in folder.rglob(SCORER_FILE))
        known = f"such as {folder / runs[0]}" if runs else "once one is finished"
        return f"{folder} holds several runs; give the folder of one of them, {known}"
    if (folder / "federation.json").is_file():
        return (
            f"{folder} is a run of a real federation, whose server has no rows to calibrate on; its weights are in "
            "model.npz: build the model, load them, and calibrate at the sites with fedauc.scoring.calibration"
        )
    if not (folder / "config.json").is_file():
        return f"{folder} has no {SCORER_FILE}; give the folder of a finished run, or one that `save` wrote"
    if not (folder / "result.json").is_file():
        return f"{folder} is a run that is not finished; go on with `fedauc resume {folder}`"
    if "calibration" in json.loads((folder / "result.json").read_text()).get("not_released", {}):
        return (
            f"{folder} has no {SCORER_FILE}: its run was private, and there were no public rows to calibrate on; its "
            "weights are in model.pt: calibrate on public rows"
        )
    return (
        f"{folder} has no {SCORER_FILE}: an older fedauc trained it, or its model gives embeddings; train it again "
        f"with `fedauc run --config {folder / 'config.json'} --out NEW`"
    )
