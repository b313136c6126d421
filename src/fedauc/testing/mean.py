"""The suite of a mean: equal uploads, bounds, the order of clients, few clients, and small runs."""

from __future__ import annotations

import torch

from fedauc.interfaces import Mean
from fedauc.testing._expectations import check_configuration, expect, expect_close
from fedauc.testing._runs import check_determinism, check_resume, check_rounds
from fedauc.testing._uploads import list_layouts, make_upload
from fedauc.testing.small_federation import small_recipe
from fedauc.trees import tree_at, tree_leaves, tree_map, tree_stack

CLIENTS = 9


def check_mean(mean: Mean) -> None:
    """Check a mean by hand, then in runs of all clients of a small federation on the loop and the batched engine."""
    check_configuration(mean, Mean)
    check_combination(mean)
    for engine in ("loop", "batched"):
        recipe = small_recipe("cycp-minimax", engine=engine, participation="full", mean=mean)
        check_rounds(recipe)
        check_determinism(recipe)
        check_resume(recipe)


def check_combination(mean: Mean) -> None:
    """`combine` gives a mean of nine clients, whatever their order, and accepts a single one."""
    name, weights = mean.name, torch.full((CLIENTS,), 1 / CLIENTS, dtype=torch.float64)
    same = tree_stack([make_upload(0).mean] * CLIENTS)
    expect_close(
        mean.combine(same, weights), tree_at(same, 0), f"{name}: the mean of equal uploads must be that upload"
    )
    uploads = tree_stack([make_upload(client).mean for client in range(CLIENTS)])
    result = mean.combine(uploads, weights)
    fits = list_layouts(result) == list_layouts(tree_at(uploads, 0))
    expect(fits, f"{name}: the mean must have the types and shapes of an upload")
    for value, values in zip(tree_leaves(result), tree_leaves(uploads), strict=True):
        inside = ((value >= values.amin(0) - 1e-12) & (value <= values.amax(0) + 1e-12)).all()
        expect(inside, f"{name}: the mean must lie between the smallest and the largest upload")
    turned = tree_map(lambda leaf: leaf.flip(0), uploads)
    expect_close(mean.combine(turned, weights), result, f"{name}: the order of the clients must not matter")
    first = tree_map(lambda leaf: leaf[:1], uploads)
    alone = mean.combine(first, torch.ones(1, dtype=torch.float64))
    expect_close(alone, tree_at(first, 0), f"{name}: the mean of a single upload must be that upload")
