"""Agreements that every message service must carry to the bits of the simulator, and that simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedauc.data.clients import Clients
from fedauc.experiments.assembly import assemble_training
from fedauc.experiments.recipe import Recipe
from fedauc.models.linear import Linear

SITES = {"site-0": "a", "site-1": "b", "site-2": "c", "site-3": "a"}
"""Three groups of two, one and one."""


class Agreement(NamedTuple):
    """A method with its settings."""

    method: str
    settings: dict[str, Any]

    def write_settings(self) -> dict[str, Any]:
        """The settings of a run: the method's, and nothing that takes time beside training."""
        return {"method": self.method, "deadline": 120.0, "evaluation": "none", **self.settings}


AGREEMENTS = {
    "balanced batches": Agreement("cycp-fedavg-balanced", {"cycles": 2}),
    "dual variables": Agreement("cycp-minimax", {"cycles": 2}),
    "a pool of scores": Agreement("cycp-pairwise", {"cycles": 2}),
    "client state": Agreement("a-scaffold", {"cycles": 2}),
}


def simulate_weights(folder: Path, method: str, secret: bytes | None = None, **settings: Any) -> np.ndarray:
    """The weights of the same training in one process, over the rows in `folder`."""
    parts = {name: [np.load(folder / "sites" / name / "rows" / f"{part}.npy") for part in "xy"] for name in SITES}
    inputs, labels = (np.concatenate([parts[name][side] for name in SITES]) for side in (0, 1))
    owner = np.repeat(list(SITES), [len(parts[name][1]) for name in SITES])
    clients = Clients.from_arrays(inputs, labels, owner, np.array([SITES[name] for name in owner]))
    recipe = Recipe.of(method, engine="loop", **settings)
    training, _, state = assemble_training(recipe, Linear().build(inputs.shape[1:], recipe.seed), clients, secret)
    *_, last = training.rounds(state)
    return np.asarray(recipe.algorithm.extract_model(last.state.server.shared).weights)


def read_trained_weights(run: Path) -> np.ndarray:
    with np.load(run / "model.npz", allow_pickle=False) as arrays:
        return np.concatenate([arrays[name].reshape(-1) for name in arrays.files])
