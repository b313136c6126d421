"""The numbers that the paper prints: test AUC, mean and standard deviation of three runs.

They are those of Tables 1 to 5, 8 and 9 of Vangapally, Wu, Chen and Guo, Communication-Efficient Federated AUC
Maximization with Cyclic Client Participation, TMLR 01/2026. The paper's figures come without numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pandas as pd

FILE = Path(__file__).parent / "published.csv"


class PublishedAuc(NamedTuple):
    """A mean and a standard deviation."""

    mean: float
    deviation: float


def published_aucs(table: str) -> Mapping[tuple[str, str], PublishedAuc]:
    """What the paper prints for each row and column of a table; nothing for tables that it does not have.

    >>> published_aucs("table1")["cycp-pairwise", "cifar10"]
    PublishedAuc(mean=0.848, deviation=0.0008)
    """
    numbers = _read_numbers()
    if table == "classes":
        # The paper does not name the positive class of its Table 1: it may be any of them.
        numbers = numbers[(numbers["table"] == "table1") & numbers["column"].isin(["cifar10", "cifar100"])]
    else:
        numbers = numbers[numbers["table"] == table]
    aucs = map(PublishedAuc, numbers["mean"], numbers["deviation"])
    return dict(zip(zip(numbers["method"], numbers["column"], strict=True), aucs, strict=True))


@functools.cache
def _read_numbers() -> pd.DataFrame:
    return pd.read_csv(FILE)
