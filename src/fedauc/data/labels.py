"""Labels of two values, whatever the file calls them: which one is positive."""

from __future__ import annotations

import shlex
from typing import NamedTuple

import numpy as np

from fedauc.data.columns import CodedTexts
from fedauc.discovery import lookup

ACCEPTED = (("0", "1"), ("false", "true"))
"""Pairs of label values whose second one is positive without a word."""

SHOWN = 5
"""How many values an error lists."""


class Labels(NamedTuple):
    """Labels 0 and 1 `[n]`, how the file writes the two classes, and a note where that needs one."""

    labels: np.ndarray
    values: tuple[str, str]
    note: str = ""


def read_labels(coded: CodedTexts, positive: str, column: str) -> Labels:
    """Labels from the coded texts of a column without missing values.

    With `positive`, that value is 1 and every other 0. Without it, the values must be 0 and 1, or false and true.

    >>> from fedauc.data.columns import code_texts
    >>> read_labels(code_texts(np.array(["no", "yes", "no"], dtype=object)), "yes", "fraud").labels
    array([0, 1, 0], dtype=int8)
    """
    values = [str(value) for value in coded.values]
    if positive:
        text = lookup(f"value of label column {column!r} for positive", positive, {value: value for value in values})
        others = sorted(value for value in values if value != text)
        is_positive = np.array([value == text for value in values], dtype=np.int8)
        note = ""
        if len(others) > 1:
            shown = ", ".join(map(repr, others[:SHOWN])) + (", ..." if len(others) > SHOWN else "")
            note = (
                f"label column {column!r}: {text!r} is positive, the other {len(others)} values are negative: {shown}"
            )
        negative = others[0] if len(others) == 1 else f"not {text}"
        return Labels(is_positive[coded.codes], (negative, text), note)
    for negative, text in ACCEPTED:
        if {value.lower() for value in values} <= {negative, text}:
            is_positive = np.array([value.lower() == text for value in values] or [False], dtype=np.int8)
            written = {value.lower(): value for value in values}
            return Labels(is_positive[coded.codes], (written.get(negative, negative), written.get(text, text)))
    counts = np.bincount(coded.codes, minlength=len(values))
    raise ValueError(_ask_for_positive(dict(zip(values, counts.tolist(), strict=True)), column))


def _ask_for_positive(counts: dict[str, int], column: str) -> str:
    """Why labels are refused, and the option as it is typed."""
    # Of values that are equally rare the last one, because 0 is rarely the positive class.
    rarer = min(sorted(counts, key=_sort_key, reverse=True), key=lambda value: counts[value])
    how = f"--data.positive {shlex.quote(rarer)}"
    if len(counts) == 2:
        first, second = (f"{value!r} ({_count_rows(counts[value])})" for value in sorted(counts))
        return (
            f"label column {column!r} holds {first} and {second}; say which one is positive, usually the rarer: use "
            f"{how}"
        )
    listed = sorted(counts, key=_sort_key)
    if len(listed) > SHOWN:
        # The rarest values are the ones to choose from.
        listed = sorted(listed, key=lambda value: counts[value])[:SHOWN]
    shown = ", ".join(f"{_show(value)} ({_count_rows(counts[value])})" for value in listed)
    others = f" and {len(counts) - SHOWN} other values" if len(counts) > SHOWN else ""
    return (
        f"label column {column!r} holds {shown}{others}; labels must be 0 or 1: name another column, or say which "
        "value is positive, and all others are negative: use --data.positive VALUE"
    )


def check_label_classes(labels: Labels, column: str) -> None:
    """Refuse a column of labels of a single class, for which no AUC is defined."""
    for value, name in ((1, "positives"), (0, "negatives")):
        if not (labels.labels == value).any():
            raise ValueError(
                f"label column {column!r} holds no {name}: all {len(labels.labels)} rows are "
                f"{_show(labels.values[1 - value])}; an AUC needs both classes: add rows labelled "
                f"{_show(labels.values[value])}, or name another column"
            )


def _count_rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _sort_key(value: str) -> tuple[int, float, str]:
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value


def _show(value: str) -> str:
    return value if _sort_key(value)[0] == 0 else repr(value)
