"""Warnings about columns: numbers and dates that were read as categories, and features that give the label away."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable

import numpy as np

from fedauc.data.checks import name_row
from fedauc.data.columns import ISO_DATE
from fedauc.data.feature_fitting import RawColumn
from fedauc.data.features import CategoryColumn, FeatureColumn, FeatureEncoder

NUMBER_TEXT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"

OTHER_DATE = re.compile(
    r"(?:\d{1,2}([/.-])\d{1,2}\1(?:\d{4}|\d\d)|\d{4}([/.])\d{1,2}\2\d{1,2}"
    rf"|\d{{1,2}}\.?[ -]{MONTH}\.?[ -]\d{{2,4}}|{MONTH}\.? \d{{1,2}},? \d{{4}})(?:,?[ T]\d{{1,2}}:\d\d.*)?",
    re.IGNORECASE,
)
"""Dates in other forms than ISO 8601, such as 31/12/2024, 12-31-24, 2024/12/31, 31 Dec 2024 and Dec 31, 2024."""

DATE_SHARE = 0.9
"""The share of the distinct texts of a column that are dates from which it looks like dates."""

LEAK_AUC = 0.999
"""The AUC of a single column, in either direction, from which it is said to separate the labels."""

MIN_LEAK_ROWS = 10
"""The rows of each class that the check needs: among fewer, chance alone separates them now and then."""

MOST_CODES = 50
"""A column with more different numbers, or dates, than this is one of numbers, not of codes."""

TEXT_SHARE = 0.05
"""The share of the rows with other text below which such a column is refused, because the text is a mistake."""

MAX_LEAK_VALUES = 100_000_000
"""Larger training parts are not checked, because sorting the columns of one this large takes about ten seconds."""


def warn_of_texts(columns: Iterable[RawColumn], categories: Collection[str]) -> tuple[str, ...]:
    """Columns that count as categories, although the user did not list them there and most of the texts say otherwise.

    >>> warn_of_texts([RawColumn("when", "category", np.zeros(0), ["31/12/2024", "01/01/2025"])], ())
    ("column 'when' looks like dates; write them as 2024-12-31 to use them as dates",)
    """
    texts = [column for column in columns if column.kind == "category" and column.name not in categories]
    warnings = (_warn_of_numbers(column) or _warn_of_dates(column) for column in texts)
    return tuple(warning for warning in warnings if warning)


def refuse_stray_texts(columns: Iterable[RawColumn], categories: Collection[str], row_numbers: np.ndarray) -> None:
    """Refuse a column of numbers or dates that a few cells of text would turn into a category, or leave out.

    `row_numbers` are the rows of the columns in the file.

    >>> amounts = RawColumn("amount", "category", np.arange(100), [*map(str, range(99)), "n/k"])
    >>> refuse_stray_texts([amounts], (), np.arange(100))
    Traceback (most recent call last):
    ...
    ValueError: column 'amount' holds 'n/k' at row 99 (counted from 0), where most rows hold numbers and 1 of 100 ...
    """
    for column in columns:
        if column.kind != "category" or column.name in categories:
            continue
        for is_member, kind in ((_is_number, "numbers"), (_is_date, "dates")):
            members = np.array([is_member(text) for text in column.texts], dtype=bool)
            if members.sum() <= MOST_CODES:
                continue
            values = np.asarray(column.values)
            known = np.flatnonzero(values >= 0)
            others = known[~members[values[known]]]
            if 0 < len(others) <= TEXT_SHARE * len(known):
                text, row = column.texts[values[others[0]]][:40], name_row(int(row_numbers[others[0]]))
                count = f"1 of {len(known)} rows does" if len(others) == 1 else f"{len(others)} of {len(known)} rows do"
                problem = f"column {column.name!r} holds {text!r} at {row}, where most rows hold {kind} and {count} not"
                remedy = "leave such cells empty, or list the column in --data.categories or --data.ignore"
                raise ValueError(f"{problem}; {remedy}")


def _is_number(text: str) -> bool:
    return NUMBER_TEXT.fullmatch(text) is not None


def _is_date(text: str) -> bool:
    return ISO_DATE.fullmatch(text) is not None


def _warn_of_numbers(column: RawColumn) -> str:
    others = [text for text in column.texts if not NUMBER_TEXT.fullmatch(text)]
    if len(column.texts) > 2 and others and 2 * len(others) < len(column.texts):
        return _blame_text(column, others[0], "numbers")
    return ""


def _warn_of_dates(column: RawColumn) -> str:
    others = [text for text in column.texts if not (ISO_DATE.fullmatch(text) or OTHER_DATE.fullmatch(text))]
    if not column.texts or len(others) > (1 - DATE_SHARE) * len(column.texts):
        return ""
    if all(ISO_DATE.fullmatch(text) or text in others for text in column.texts):
        return _blame_text(column, others[0], "dates")
    return f"column {column.name!r} looks like dates; write them as 2024-12-31 to use them as dates"


def _blame_text(column: RawColumn, text: str, kind: str) -> str:
    return (
        f"column {column.name!r} counts as categories because it holds {text[:40]!r} among {kind}; leave such cells "
        f"empty to use it as {kind}"
    )


def warn_of_leaks(inputs: np.ndarray, labels: np.ndarray, encoder: FeatureEncoder) -> tuple[str, ...]:
    """Columns that alone separate the labels of the training rows.

    This looks at the rows of all sites together, which only a simulation can do. It is for the user's eyes: nothing of
    it reaches the model, and a federation of real sites does not run it.
    """
    is_positive = np.asarray(labels) == 1
    positives = int(is_positive.sum())
    if min(positives, len(labels) - positives) < MIN_LEAK_ROWS or inputs.size > MAX_LEAK_VALUES:
        return ()
    warnings, position = [], 0
    for column in encoder.columns:
        width = len(column.feature_names)
        if find_column_auc(inputs[:, position : position + width], is_positive, column) >= LEAK_AUC:
            warnings.append(
                f"column {column.name!r} alone separates the labels; use --data.ignore {shlex.quote(column.name)} "
                "if it is known only after the outcome"
            )
        position += width
    return tuple(warnings)


def find_column_auc(inputs: np.ndarray, is_positive: np.ndarray, column: FeatureColumn) -> float:
    """The AUC of the best score that one column gives.

    A category is scored by its share of positives, and a number or a date by the best of its inputs, in either
    direction: its value, or whether it is missing.
    """
    if isinstance(column, CategoryColumn):
        # A row of an unlisted category has only zeros, which become a category of their own.
        codes = np.where(inputs.any(axis=1), inputs.argmax(axis=1), inputs.shape[1])
        counts = np.bincount(codes)
        shares = np.bincount(codes, is_positive, len(counts)) / np.maximum(1, counts)
        return _compute_auc(shares[codes], is_positive)
    input_numbers = [0, inputs.shape[1] - 1] if column.has_indicator else [0]
    areas = [_compute_auc(inputs[:, number], is_positive) for number in input_numbers]
    return max(max(area, 1 - area) for area in areas)


def _compute_auc(scores: np.ndarray, is_positive: np.ndarray) -> float:
    """The share of pairs in which the positive has the higher score, with ties counted half."""
    positives, negatives = np.sort(scores[is_positive]), np.sort(scores[~is_positive])
    below = np.searchsorted(negatives, positives, side="left").sum(dtype=np.float64)
    not_above = np.searchsorted(negatives, positives, side="right").sum(dtype=np.float64)
    return float((below + not_above) / (2 * len(positives) * len(negatives)))
