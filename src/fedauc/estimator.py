"""`FederatedAUCClassifier`: federated AUC maximization behind the interface of scikit-learn.

The rows of all sites are in one table here, so this simulates a federation: the methods, the schedules and what travels
are those of `fedauc.fit`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fedauc.data.clients import Clients, examples
from fedauc.data.columns import is_table, list_column_names, read_columns
from fedauc.data.dataset import Rows
from fedauc.data.feature_fitting import FeatureSettings, RawColumn, RawEncoder, fit_features
from fedauc.data.names import as_names
from fedauc.data.raw_tables import convert_column
from fedauc.data.splits import hold_out_validation
from fedauc.data.table_loading import number_sites
from fedauc.discovery import lookup
from fedauc.experiments.evaluation import score_rows
from fedauc.experiments.fitting import fit
from fedauc.experiments.recipe import Recipe
from fedauc.models import ModelConfig, find_models
from fedauc.network import ModuleNetwork
from fedauc.scoring.calibration import PlattCalibration, fit_calibration

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.metrics import roc_auc_score
    from sklearn.utils import check_consistent_length, check_random_state
    from sklearn.utils.multiclass import type_of_target
    from sklearn.utils.validation import _check_feature_names_in, check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise ImportError(
        f"FederatedAUCClassifier needs scikit-learn 1.6 or later ({error}); run pip install scikit-learn"
    ) from error

SHOWN_VALUES = 5
"""How many labels an error shows."""

SMALLEST_SLOPE = 1e-3
"""Slope of the calibration per standard deviation of the scores where a fitted slope would turn the ranking around."""


@dataclass(eq=False, repr=False)
class FederatedAUCClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A binary classifier that maximizes the AUC over sites, which take part in turns.

    method : a name that `fedauc list methods` shows.
    model : a name that `fedauc list models` shows, such as "linear", "mlp" or "tabular", one of the classes behind
        these names with its parameters, such as `MLP(hidden=(32,))`, or a `torch.nn.Module` with one output.
    groups : the number of groups of sites; by default one per group label, or 10.
    cycles : how often each group of sites is visited.
    learning_rate : that of the local steps; the method has its own.
    validation_fraction : share of the rows of each class that is held out to compare rounds and to calibrate.
    patience : cycles without a higher validation AUC before training stops.
    keep : "last" or "best": the model of the last round, or of the round with the highest validation AUC.
    standardize : whether columns of numbers are scaled to mean 0 and standard deviation 1.
    bins : bins of the piecewise-linear encoding of each column of numbers, which suits the model "tabular"; 0 for none.
    random_state : the seed, or a generator to draw it from.
    settings : other fields of the recipe, the algorithm or the schedule, as `fedauc.fit` takes them, such as
        `{"local_steps": 8, "objective": "squared-hinge"}`.
    verbose : whether lines on standard error say how far training is.

    After `fit`: `classes_`, `n_features_in_`, `feature_names_in_` for tables with names, `module_` (the trained
    network), `encoder_` (how columns become inputs), `ignored_columns_` (columns of a table that say nothing, with the
    reasons), `history_` (round and validation quality per cycle), `round_` (that of the model), `stopped_early_` (why,
    or None), `traffic_` (bytes) and `calibration_`.

    >>> from sklearn.datasets import make_classification
    >>> X, y = make_classification(300, weights=[0.9], random_state=0)
    >>> model = FederatedAUCClassifier(groups=2, cycles=5).fit(X, y, clients=np.arange(300) % 6)
    >>> model.score(X, y) > 0.9
    True
    """

    method: str = "cycp-pairwise"
    model: str | ModelConfig | nn.Module = "linear"
    groups: int | None = None
    cycles: int = 30
    learning_rate: float | None = None
    validation_fraction: float = 0.0
    patience: int | None = None
    keep: str = "last"
    standardize: bool = True
    bins: int = 0
    random_state: Any = 0
    settings: Mapping[str, Any] | None = None
    verbose: bool = False

    # A splitter such as LeaveOneGroupOut is given `groups` too, which are then folds and no groups of the schedule.
    __metadata_request__fit = {"clients": True, "groups": False}  # noqa: RUF012

    def fit(self, X: Any, y: Any, clients: Any = None, groups: Any = None) -> FederatedAUCClassifier:
        """Train on rows X with labels y of any two values, of which the larger one is the positive class.

        X is an array of numbers, or a frame that may also hold text, dates, booleans and missing values.
        `clients` names the site of each row; without it all rows are at one site. `groups` names the group of each row,
        the same for all rows of a site.
        """
        seed = self._choose_seed()
        recipe = self._make_recipe(seed)
        if groups is not None and not hasattr(recipe.participation, "groups"):
            raise ValueError(
                f"groups are given, but the schedule {recipe.participation.name!r} of {self.method} has no groups: "
                "leave them out, or use a cyclic method"
            )
        columns, labels = self._read_columns(X, y)
        client = as_names(np.zeros(len(labels)) if clients is None else clients, "client", len(labels))
        group = None if groups is None else as_names(groups, "group", len(labels))
        # The inputs are row numbers until the columns are encoded, by what the training rows alone say about them.
        rows = Rows(np.arange(len(labels)), labels, client, group)
        train, validation = hold_out_validation(rows, self._check_validation_fraction(), seed)
        train, validation = self._encode_parts(columns, train, validation)
        fitted = fit(
            self._build_module(train.inputs.shape[1], seed),
            Clients.from_arrays(*train[:4]),
            recipe,
            verbose=self.verbose,
            validation=validation and examples(*validation[:3]),
        )
        # In float64 the score of a row does not depend on the rows beside it.
        self.module_ = fitted.module.double()
        self.history_, self.round_ = fitted.history, fitted.round
        self.stopped_early_, self.traffic_ = fitted.stopped_early, fitted.traffic
        if recipe.is_private and (validation is None or recipe.private_evaluation):
            # Exact scores of protected rows are not covered by the budget, so the log-odds are the scores themselves.
            self.calibration_ = PlattCalibration(1.0, 0.0)
        else:
            self.calibration_ = self._fit_calibration(validation or train)
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """The calibrated log-odds of the positive class, `[n]`; they rank rows as the scores of the model do."""
        check_is_fitted(self)
        table = X if self._needs_table else validate_data(self, X, dtype=np.float64, reset=False)
        scores = self._score(self.encoder_.encode(table))
        return np.asarray(self.calibration_.slope * scores + self.calibration_.intercept)

    def predict_proba(self, X: Any) -> np.ndarray:
        """The calibrated probabilities of both classes, `[n, 2]`, in the order of `classes_`."""
        logits = self.decision_function(X)
        positive = (1 + np.tanh(logits / 2)) / 2
        return np.stack([1 - positive, positive], axis=1)

    def predict(self, X: Any) -> np.ndarray:
        """The more probable class; for rare positives a threshold of your own serves better."""
        positive = self.decision_function(X) > 0
        return np.asarray(self.classes_[positive.astype(int)])

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The AUC."""
        scores, labels = self.decision_function(X), column_or_1d(y)
        values, classes = np.unique(labels).tolist(), self.classes_.tolist()
        if values != classes:
            remedy = "an AUC needs rows of both" if set(values) < set(classes) else "score rows of these classes"
            raise ValueError(f"y holds {_list_values(values)}, and the classes are {_list_values(classes)}: {remedy}")
        return float(roc_auc_score(labels, scores, sample_weight=sample_weight))

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """The names of the model's inputs."""
        check_is_fitted(self)
        _check_feature_names_in(self, input_features)
        return np.array(self.encoder_.feature_names, dtype=object)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    # ------------------------------------------------------------------------------------------------ parameters

    def _choose_seed(self) -> int:
        if isinstance(self.random_state, numbers.Integral):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _make_recipe(self, seed: int) -> Recipe:
        settings = dict(self.settings or {})
        fixed = {"cycles": self.cycles, "patience": self.patience, "keep": self.keep, "seed": seed}
        optional = {"groups": self.groups, "learning_rate": self.learning_rate}
        for name in (*fixed, *optional):
            if name in settings:
                parameter = "random_state" if name == "seed" else name
                raise ValueError(f"settings holds {name!r}; use the parameter {parameter} of FederatedAUCClassifier")
        chosen = {name: value for name, value in optional.items() if value is not None}
        return Recipe.of(self.method, **fixed, **chosen, **settings)

    def _check_validation_fraction(self) -> float:
        fraction = self.validation_fraction
        if not isinstance(fraction, numbers.Real) or not 0 <= fraction < 1:
            raise ValueError(f"validation_fraction is {fraction!r}; it must be a number of at least 0 and below 1")
        for name, value, default in (("keep", self.keep, "last"), ("patience", self.patience, None)):
            if value != default and not fraction:
                remedy = f"raise it, say to 0.2, or leave {name} at {default!r}"
                raise ValueError(
                    f"{name} is {value!r}, but validation_fraction is 0, so that no rows compare rounds: {remedy}"
                )
        return float(fraction)

    def _check_bins(self) -> int:
        bins = self.bins
        if not isinstance(bins, numbers.Integral) or isinstance(bins, bool) or bins < 0 or bins == 1:
            raise ValueError(f"bins is {bins!r}; it must be 0, or a whole number of at least 2: 16 is a good start")
        if bins and not self.standardize:
            raise ValueError(f"bins is {bins}, but standardize is False; bins are of standardised values: use 0 bins")
        return int(bins)

    def _build_module(self, width: int, seed: int) -> nn.Module:
        if isinstance(self.model, nn.Module):
            return self.model
        if isinstance(self.model, ModelConfig):
            return self.model.build((width,), seed)
        return lookup("model", self.model, find_models())().build((width,), seed)

    # ------------------------------------------------------------------------------------------------------ rows

    def _read_columns(self, X: Any, y: Any) -> tuple[dict[str, RawColumn], np.ndarray]:
        """The columns by name, and the labels as 0 and 1.

        Arrays, and frames of numbers without gaps, are read by the rules of scikit-learn.
        """
        self._needs_table = _needs_encoding(X)
        if self._needs_table:
            arrays = read_columns(X, list_column_names(X))
            self.feature_names_in_ = np.array(list(arrays), dtype=object)
            self.n_features_in_ = len(arrays)
            columns = {name: convert_column(values, name) for name, values in arrays.items()}
            labels = column_or_1d(y, warn=True)
            check_consistent_length(*(column.values for column in columns.values()), labels)
        else:
            inputs, labels = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
            names = _check_feature_names_in(self).tolist()
            columns = {name: RawColumn(name, "number", inputs[:, index]) for index, name in enumerate(names)}
        kind = type_of_target(labels, input_name="y", raise_unknown=True)
        self.classes_ = np.unique(labels)
        if kind != "binary":
            raise ValueError(f"Only binary classification is supported. The type of the target is {kind}.")
        if len(self.classes_) < 2:
            alone = f"y holds the class {self.classes_.tolist()[0]!r} alone in {len(labels)} rows"
            raise ValueError(f"{alone}; an AUC needs two classes: add rows of the other one, or make other folds")
        return columns, (labels == self.classes_[1]).astype(np.int8)

    def _encode_parts(
        self, columns: Mapping[str, RawColumn], train: Rows, validation: Rows | None
    ) -> tuple[Rows, Rows | None]:
        """Both parts with inputs, by an encoder that is fitted to summaries of the sites' training rows."""
        # Arrays keep their width, and a table loses columns that say nothing.
        kept_columns = () if self._needs_table else tuple(columns)
        settings = FeatureSettings(self.standardize, self._check_bins(), kept=kept_columns)
        training_columns = [column._replace(values=column.values[train.inputs]) for column in columns.values()]
        fitted = fit_features(training_columns, settings, *number_sites(train.client))
        self.encoder_, self.ignored_columns_ = fitted.encoder, dict(fitted.ignored)
        encoder = RawEncoder(fitted.encoder, columns)
        inputs = encoder.encode_rows(np.asarray(train.inputs)) if fitted.encoder.columns else np.zeros((1, 0))
        if (inputs == inputs[0]).all():
            raise ValueError(
                f"all {self.n_features_in_} features are constant in the {len(train.labels)} training rows, so that no "
                "model can rank these: add a feature that differs from row to row"
            )
        if validation is not None:
            validation = validation._replace(inputs=encoder.encode_rows(np.asarray(validation.inputs)))
        return train._replace(inputs=inputs), validation

    def _score(self, inputs: np.ndarray) -> np.ndarray:
        network = ModuleNetwork(self.module_)
        return score_rows(network, network.initial_model(), torch.from_numpy(inputs))

    def _fit_calibration(self, rows: Rows) -> PlattCalibration:
        """Platt scaling by the histograms of the sites; a positive slope keeps the ranking of the model."""
        scores = self._score(np.asarray(rows.inputs))
        fitted = fit_calibration(rows.labels, scores, rows.client)
        assert isinstance(fitted, PlattCalibration)
        slope = SMALLEST_SLOPE / float(scores.std() or 1.0)
        if fitted.slope >= slope:
            return fitted
        rate = float(rows.labels.mean())
        return PlattCalibration(slope, math.log(rate / (1 - rate)) - slope * float(scores.mean()))


def _needs_encoding(table: Any) -> bool:
    """Whether a frame has columns that are no numbers, or numbers that are missing.

    Columns are found by name, so frames without names of text are arrays, as everywhere in scikit-learn.
    """
    if not is_table(table) or isinstance(table, Mapping):
        return False
    if hasattr(table, "iloc") and not all(isinstance(name, str) for name in table.columns):
        return False
    columns = read_columns(table, list_column_names(table)).values()
    return any(values.dtype.kind not in "iufb" or bool(np.isnan(values).any()) for values in columns)


def _list_values(values: list[Any]) -> str:
    shown = [repr(value) for value in values[:SHOWN_VALUES]] + ["..."] * (len(values) > SHOWN_VALUES)
    return ", ".join(shown)
