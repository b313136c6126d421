"""Private standardisation: columns are shifted and scaled by noised moments of the clients' rows.

A dataset standardises its rows by exact moments over all clients, which is a release about each of them. Where every
column is a plain number, that step is undone, x = z·deviation + mean, and the rows are standardised again by
`noised_moments`, whose noise is counted in the account of the run. Vocabularies of categories, quantiles and indicators
of missing values are exact as well, and cannot be undone: such tables are refused.

Which columns there are counts as public. So does the training mean where it replaces a missing value of a held-out row
in a column that no training row lacks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedauc.data.clients import Clients, Examples
from fedauc.data.features import FeatureEncoder, NumberColumn
from fedauc.data.preparation import Split
from fedauc.data.standardization import scale_rows
from fedauc.experiments.private_training import (
    STANDARDIZATION,
    find_client_dp,
    make_one_off_noise,
    standardization_noise,
)
from fedauc.experiments.recipe import Recipe
from fedauc.privacy.statistics import noised_moments


def has_private_standardization(recipe: Recipe) -> bool:
    """Whether a recipe asks for standardisation within its budget."""
    transform = find_client_dp(recipe)
    return transform is not None and transform.standardization == "private"


def standardize_privately(split: Split, recipe: Recipe, secret: bytes | None = None) -> Split:
    """The split with all parts standardised by noised moments, and an encoder that does the same to new rows."""
    transform = find_client_dp(recipe)
    assert transform is not None
    columns = _list_number_columns(split)
    mean, deviation = (np.array([getattr(column, name) for column in columns]) for name in ("shift", "scale"))
    bounds = transform.column_bounds
    if len(bounds) not in (1, len(columns)):
        raise ValueError(
            f"column_bounds has {len(bounds)} numbers, but there are {len(columns)} columns "
            f"({', '.join(column.name for column in columns[:8])}): give one number, or one for each column"
        )
    if not all(0 < bound < np.inf for bound in bounds):
        raise ValueError(f"column_bounds is {bounds}; every bound must be a finite number above 0: raise it")

    def restore_rows(inputs: Tensor) -> np.ndarray:
        raw: np.ndarray = inputs.cpu().numpy().astype(np.float64) * deviation + mean
        return raw.astype(np.float32)

    train = restore_rows(split.train.inputs)
    noise = make_one_off_noise(recipe.seed, secret, STANDARDIZATION)
    noised_mean, noised_deviation = noised_moments(
        train,
        _find_client_of_row(split.train),
        np.array(bounds * len(columns) if len(bounds) == 1 else bounds),
        standardization_noise(recipe),
        lambda count: noise.draw_normal(0, count).numpy(),
    )

    def scale_inputs(raw: np.ndarray) -> Tensor:
        return torch.from_numpy(scale_rows(raw, noised_mean, noised_deviation).astype(np.float32))

    def scale_examples(part: Examples) -> Examples:
        return part._replace(inputs=scale_inputs(restore_rows(part.inputs)))

    return split._replace(
        train=replace(split.train, inputs=scale_inputs(train)),
        validation=None if split.validation is None else scale_examples(split.validation),
        test=scale_examples(split.test),
        encoder=FeatureEncoder.of_numbers([column.name for column in columns], noised_mean, noised_deviation),
    )


def _list_number_columns(split: Split) -> list[NumberColumn]:
    """The columns of a table whose preparation can be undone."""
    remedy = "treat the preparation as public with standardization 'public', the default"
    if split.encoder is None:
        raise ValueError(
            "standardization is 'private', but the dataset does not say how its inputs were prepared from columns of "
            f"numbers: {remedy}"
        )
    columns = []
    for column in split.encoder.columns:
        if not isinstance(column, NumberColumn) or column.edges or column.has_indicator:
            raise ValueError(
                f"standardization is 'private', but column {column.name!r} is not a plain number: vocabularies, dates, "
                f"quantiles and indicators of missing values are exact counts over all clients; {remedy}"
            )
        columns.append(column)
    return columns


def _find_client_of_row(clients: Clients) -> np.ndarray:
    """The number of the client that each row of the inputs belongs to."""
    client_of_row = np.empty(len(clients.rows), dtype=np.int64)
    client_of_row[clients.rows] = np.repeat(np.arange(len(clients)), np.diff(clients.offsets))
    return client_of_row
