"""The demo data as the rows of made-up sites, for a trial on one machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedauc.data.creditcard import CreditCard
from fedauc.data.dataset import Rows


def deal_demo(folder: Path, names: list[str]) -> None:
    """The demo's card transactions, dealt to sites by the hour: site i gets hours i, i + n, i + 2n, ..."""
    table = CreditCard().load(0)
    for place, name in enumerate(names):
        home = folder / name / "rows"
        home.mkdir(parents=True)
        for prefix, rows in (("", table.train), ("test_", table.test)):
            mine = _of(rows, place, len(names))
            np.save(home / f"{prefix}x.npy", np.asarray(mine.inputs, np.float32))
            np.save(home / f"{prefix}y.npy", mine.labels)


def _of(rows: Rows, place: int, count: int) -> Rows:
    hours = (
        np.array([int(str(client).removeprefix("hour-")) for client in rows.client]) if rows.client is not None else 0
    )
    return rows.take(np.flatnonzero(hours % count == place))
