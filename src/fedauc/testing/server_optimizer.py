"""The suite of a server optimizer: its direction, its state, and small runs."""

from __future__ import annotations

import torch

from fedauc.interfaces import ServerOptimizer
from fedauc.testing._expectations import check_configuration, expect, same_bits
from fedauc.testing._runs import check_determinism, check_resume, check_rounds
from fedauc.testing._uploads import list_layouts
from fedauc.testing.small_federation import small_recipe

METHODS = ("cycp-fedavg", "a-scaffold", "cycp-minimax", "cycp-pairwise")
"""A method of each family: plain, with control variates, with dual variables, with pools."""


def check_server_optimizer(optimizer: ServerOptimizer) -> None:
    """Check an optimizer by hand, then in runs of four methods."""
    check_configuration(optimizer, ServerOptimizer)
    check_updates(optimizer)
    for method in METHODS:
        recipe = small_recipe(method, server_optimizer=optimizer)
        check_rounds(recipe)
        check_determinism(recipe)
        check_resume(recipe)


def check_updates(optimizer: ServerOptimizer) -> None:
    """`update` is pure, keeps the state's types and shapes, and follows the changes."""
    name, weights = optimizer.name, torch.linspace(-1, 1, 6, dtype=torch.float64)
    state, change = optimizer.init(weights), torch.linspace(0.1, 0.2, 6, dtype=torch.float64)
    still, _ = optimizer.update(torch.zeros_like(change), state)
    expect(not still.any(), f"{name}: without any change so far, the weights must not move")
    step, new_state = optimizer.update(change, state)
    expect(list_layouts(step) == list_layouts(change), f"{name}: the step must have the type and shape of the change")
    expect(list_layouts(new_state) == list_layouts(state), f"{name}: the state must keep its types and shapes")
    expect(same_bits(optimizer.update(change, state), (step, new_state)), f"{name}: update must be a pure function")
    total = torch.zeros_like(weights)
    for _ in range(50):
        step, state = optimizer.update(change, state)
        total = total + step
    expect((total > 0).all(), f"{name}: fifty equal changes must move the weights in their direction")
