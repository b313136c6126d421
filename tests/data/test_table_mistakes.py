"""What a user of `--data table` gets wrong is named: the value, its row, and what to write instead."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from fedauc.data.checks import counting_rows_from, name_row
from fedauc.data.columns import as_numbers


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            ["42.51", "7", None, "n/a?", "bad"],
            "column 'x' holds 'n/a?' at row 3 (counted from 0); it must hold numbers",
        ),
        ([1.5, "7"], "column 'x' holds '7' at row 1 (counted from 0), which is text; it must hold numbers"),
        (["yes", "no"], "column 'x' holds 'yes' at row 0 (counted from 0); it must hold booleans or numbers"),
        ([True, "true", "No"], "column 'x' holds 'No' at row 2 (counted from 0); it must hold booleans or numbers"),
        (["yes", "perhaps"], "column 'x' holds 'yes' at row 0 (counted from 0); it must hold numbers: correct it"),
    ],
)
def test_the_first_value_that_is_no_number_is_named_with_its_row(values: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        as_numbers(np.array(values, dtype=object), "x")


def test_yes_and_no_for_booleans_are_answered_with_true_and_false() -> None:
    with pytest.raises(ValueError, match=r"write true or false$"):
        as_numbers(np.array(["no", "yes", None], dtype=object), "member")


def test_rows_of_a_block_are_counted_from_the_beginning_of_the_file() -> None:
    message = re.escape("9 wrong, the first row 104 (counted from 0) and the last row 110 (counted from 0)")
    with pytest.raises(ValueError, match=message), counting_rows_from(100):
        raise ValueError(f"9 wrong, the first {name_row(4)} and the last {name_row(10)}")
