"""A warning about columns of very different sizes, which gradient steps do not bear."""

from __future__ import annotations

import logging

import numpy as np

from fedauc.data.clients import Clients

MAX_RATIO = 1e3
"""How much larger the deviation of a column may be than that of another, or its mean than its own deviation."""

SAMPLED_ROWS = 4096
"""How many rows are looked at."""


def warn_of_scales(clients: Clients) -> None:
    """Say so if one learning rate cannot fit all columns of a table of floats."""
    if clients.inputs.ndim != 2 or not clients.inputs.is_floating_point():
        return
    stride = max(1, len(clients.inputs) // SAMPLED_ROWS)
    rows = clients.inputs[::stride].double().cpu().numpy()
    mean, deviation = np.abs(rows.mean(0)), rows.std(0)
    varying = np.flatnonzero(deviation > 0)
    if not len(varying):
        return
    largest, smallest = varying[deviation[varying].argmax()], varying[deviation[varying].argmin()]
    shifted = varying[(mean[varying] / deviation[varying]).argmax()]
    names = clients.feature_names or tuple(map(str, range(rows.shape[1])))
    if deviation[largest] > MAX_RATIO * deviation[smallest]:
        reason = (
            f"column {names[largest]} has standard deviation {deviation[largest]:.3g} and column {names[smallest]} "
            f"{deviation[smallest]:.3g}"
        )
    elif mean[shifted] > MAX_RATIO * deviation[shifted]:
        reason = f"column {names[shifted]} has mean {mean[shifted]:.3g} and standard deviation {deviation[shifted]:.3g}"
    else:
        return
    logging.getLogger("fedauc").warning(
        "%s; one learning rate does not fit both: standardise the columns, or use fedauc.Table, which does", reason
    )
