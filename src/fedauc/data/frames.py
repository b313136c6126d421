"""Reading the columns of a pandas frame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedauc.data.checks import as_inputs
from fedauc.data.dataset import Rows
from fedauc.discovery import lookup

if TYPE_CHECKING:
    import pandas as pd


class Columns(NamedTuple):
    """Which column is what: an empty `client` or `group` says there is none, empty `features` all other numbers."""

    label: str
    client: str
    group: str = ""
    features: tuple[str, ...] = ()


def resolve(frame: pd.DataFrame, columns: Columns) -> Columns:
    """The same columns with the features spelled out, all of them known to be there and numeric."""
    _check_names(frame)
    if len(frame) == 0:
        # An empty column has no type, so any later complaint would be about that.
        raise ValueError("the table has no rows; give at least one positive and one negative")
    for name in (columns.label, columns.client, columns.group, *columns.features):
        if name:
            lookup("column", name, dict.fromkeys(frame.columns, True))
    numeric = {name for name in frame.columns if _is_numeric(frame[name].dtype)}
    if not columns.features:
        return columns._replace(features=_others(frame, columns, numeric))
    for name in columns.features:
        if name not in numeric:
            raise ValueError(f"feature column {name!r} is {frame[name].dtype}, not numbers; encode it or leave it out")
    return columns


def read(frame: pd.DataFrame, columns: Columns) -> Rows:
    """The rows of a frame; `columns` must have been resolved. All-integer features become float32."""
    features = frame[list(columns.features)]
    double = any(str(dtype).lower() == "float64" for dtype in features.dtypes)
    values = features.to_numpy(dtype=np.float64 if double else np.float32, na_value=np.nan)
    return Rows(
        as_inputs(values, columns.features).numpy(),
        _column(frame, columns.label),
        _column(frame, columns.client) if columns.client else None,
        _column(frame, columns.group) if columns.group else None,
    )


def _column(frame: pd.DataFrame, name: str) -> np.ndarray:
    missing = np.flatnonzero(frame[name].isna())
    if len(missing):
        raise ValueError(
            f"column {name!r} is missing in {len(missing)} rows, the first row {missing[0]}; drop or fill them"
        )
    values: np.ndarray = frame[name].to_numpy()
    return values


def _check_names(frame: pd.DataFrame) -> None:
    odd = [name for name in frame.columns if not isinstance(name, str)]
    if odd:
        raise ValueError(f"column {odd[0]!r} has no text for a name: use frame.columns = frame.columns.astype(str)")
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise ValueError(f"column {twice!r} appears twice; rename or drop one")


def _others(frame: pd.DataFrame, columns: Columns, numeric: set[Any]) -> tuple[str, ...]:
    taken = {columns.label, columns.client, columns.group}
    names = tuple(name for name in frame.columns if name in numeric and name not in taken)
    if not names:
        raise ValueError(f"no numeric column is left for features among {list(map(str, frame.columns))}; encode some")
    return names


def _is_numeric(dtype: Any) -> bool:
    from pandas.api.types import is_numeric_dtype

    return bool(is_numeric_dtype(dtype))
