"""Wrong data is refused in one line that names the value, its position and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedauc.data.clients import Clients, examples

X = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
Y = [0, 1, 0]
C = ["a", "b", "a"]
HOLES = [[0.0, 1.0], [2.0, float("nan")], [float("inf"), 5.0]]
HOLE = [0.0, np.nan, 1.0]
FRAME = pd.DataFrame({"x": [0.0, 1.0, 2.0], "y": Y, "who": C, "word": C})
MISSING: tuple[Any, ...] = (["a", None, "b"], ["a", "", "b"], [1.0, np.nan, 2.0], np.array(["a", pd.NA, "b"], object))


class Endless(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def dataset(*items: Any) -> Any:
    class Items(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(items)

        def __getitem__(self, row: int) -> Any:
            return items[row]

    return Items()


CASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: examples(X, [-1, 1, -1]), "labels holds -1; labels must be 0 or 1: use labels > 0"),
    (lambda: examples(X, [0, 1, 2]), "labels holds 2; labels must be 0 or 1: use labels == 2"),
    (lambda: examples(X, [0.5, 1, 3]), "labels holds 0.5, 3; labels must be 0 or 1"),
    (lambda: examples(X, ["no", "yes", "no"]), "labels holds 'no', 'yes'; labels must be 0 or 1"),
    (lambda: examples(X, np.array([0, "yes", None], object)), "labels holds '0', 'None', 'yes'; labels must be"),
    (
        lambda: examples(X, [0, np.nan, 1]),
        "labels holds 1 NaN, the first at row 1 (counted from 0); drop the rows without a label",
    ),
    (lambda: examples(X, np.array([0, None, 1], object)), "labels holds 1 NaN, the first at row 1"),
    (lambda: examples(X, [[0], [1], [0]]), "labels has shape (3, 1); it must be one-dimensional"),
    (lambda: examples(X, [0, 1]), "inputs has 3 rows and labels has 2; give one label per row"),
    (lambda: examples(X, [0, 0, 0]), "labels holds no positives in 3 rows; an AUC needs both classes"),
    (lambda: examples(X, [1, 1, 1]), "labels holds no negatives in 3 rows; an AUC needs both classes"),
    (
        lambda: examples(X, [0, 1, 0]),
        "labels holds 1 of the at least 2 positives that an AUC's confidence interval needs",
    ),
    (
        lambda: examples(X, [1, 0, 1]),
        "labels holds 1 of the at least 2 negatives that an AUC's confidence interval needs",
    ),
    (
        lambda: examples(HOLES, Y),
        "inputs holds 2 values that are not finite, the first nan at row 1 (counted from 0), column 1: fill",
    ),
    (lambda: examples(torch.full((1, 2, 2), torch.inf), [1]), "the first inf at row 0 (counted from 0), column (0, 0)"),
    (lambda: examples(np.zeros((0, 2)), []), "inputs has no rows; give at least one positive and one negative"),
    (lambda: examples([0.0, 1.0, 2.0], Y), "inputs has shape (3,); it must be [rows, features...]"),
    (lambda: examples(np.zeros((3, 0)), Y), "inputs has shape (3, 0); it must be [rows, features...]"),
    (lambda: examples([[0.0], [1.0, 2.0], [3.0]], Y), "inputs is a ragged list; give every row the same length"),
    (lambda: examples([["u"], ["v"], ["w"]], Y), "inputs has dtype <U1; it must be numbers"),
    (
        lambda: examples([*X, X[0]], [0, 1, 0, 1], clients=["a"]),
        "client has shape (1,) and inputs has 4 rows; give one client name per row",
    ),
    *[
        (
            lambda m=m: Clients.from_arrays(X, Y, m),
            "client is missing in 1 rows, the first row 1 (counted from 0); name a",
        )
        for m in MISSING
    ],
    (
        lambda: Clients.from_arrays(X, Y, [0.5, 1, 2]),
        "client is 0.5 in row 0 (counted from 0); a client name must be an integer or a",
    ),
    (
        lambda: Clients.from_arrays(X, Y, [np.inf, 1, 2]),
        "client is inf in row 0 (counted from 0); a client name must be an integer or a",
    ),
    (lambda: Clients.from_arrays(X, [0, 0, 0], C), "labels holds no positives in 3 rows"),
    (
        lambda: Clients.from_arrays(X, Y, C, group=[1, 1, 2]),
        "client 'a' has rows in groups 1 and 2; give each client one",
    ),
    (
        lambda: Clients.from_assignment(X, Y, [0, 2, 0], ["a", "b"]),
        "assignment is 2 in row 1 (counted from 0); it must be at least 0",
    ),
    (
        lambda: Clients.from_assignment(X, Y, [0, -1, 0], ["a", "b"]),
        "assignment is -1 in row 1 (counted from 0); it must be at least 0",
    ),
    (
        lambda: Clients.from_assignment(X, Y, [0.0, 1.0, 0.0], ["a", "b"]),
        "assignment is float64 (3,); give one integer",
    ),
    (
        lambda: Clients.from_assignment(X, Y, [0, 1, 0], ["a", "b"], [1]),
        "groups has 1 labels; give one for each of the 2",
    ),
    (lambda: Clients.from_dataset(dataset(), []), "Items has no rows"),
    (lambda: Clients.from_dataset(Endless(), []), "give a map-style dataset"),
    (lambda: Clients.from_dataset(dataset((X[0], 0), ([1.0], 1)), [1, 1]), "dataset item 1 has shape (1,) and item 0"),
    (lambda: Clients.from_dataset(dataset(("picture", 0)), [1]), "dataset item 0 is no pair of a tensor and a label"),
    (lambda: Clients.from_frame(FRAME, "z", "who"), "unknown column 'z': known: "),
    (lambda: Clients.from_frame(FRAME, "y", "whom"), "unknown column 'whom': did you mean 'who'?"),
    (lambda: Clients.from_frame(FRAME, "y", "who", ["word"]), "feature column 'word' is"),
    (lambda: Clients.from_frame(FRAME[["y", "who", "word"]], "y", "who"), "no numeric column is left for features"),
    (
        lambda: Clients.from_frame(FRAME.assign(x=HOLE), "y", "who"),
        "the first nan at row 1 (counted from 0), column 'x'",
    ),
    (lambda: Clients.from_frame(FRAME.assign(who=MISSING[0]), "y", "who"), "column 'who' is missing in 1 rows"),
    (
        lambda: Clients.from_frame(FRAME.assign(y=HOLE), "y", "who"),
        "column 'y' is missing in 1 rows, the first",
    ),
    (lambda: Clients.from_frame(FRAME.rename(columns={"x": "y"}), "y", "who"), "column 'y' appears twice"),
    (lambda: Clients.from_frame(FRAME.iloc[:0], "y", "who"), "the table has no rows; give at least one positive"),
    (lambda: Clients.from_frame(pd.DataFrame([[1.0, 2.0]]), "y", "who"), "column 0 has no text for a name"),
]


@pytest.mark.parametrize(("build", "message"), CASES, ids=[message for _, message in CASES])
def test_wrong_data_is_refused_in_one_line(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_bool_labels_are_fine() -> None:
    inputs, labels = [*X, X[0]], [False, True, False, True]
    assert examples(inputs, labels).labels.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert examples(inputs, torch.tensor(labels, dtype=torch.bfloat16)).labels.tolist() == [0.0, 1.0, 0.0, 1.0]
