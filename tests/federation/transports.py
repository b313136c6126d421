"""Agreements that every message service must carry to the bits of the simulator, and that simulator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedauc.data.clients import Clients
from fedauc.experiments.assembly import Assembly, assemble_training
from fedauc.experiments.recipe import Recipe
from fedauc.federation.site_data import split_rows
from fedauc.models.linear import Linear
from fedauc.training import Round

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


def read_site_rows(folder: Path, name: str, validation_fraction: float, part: int) -> list[np.ndarray]:
    """The rows and labels that a site trains on (part 0) or holds out (part 1)."""
    inputs, labels = (np.load(folder / "sites" / name / "rows" / f"{side}.npy") for side in "xy")
    rows = split_rows(labels, validation_fraction, "validation")[part]
    return [inputs[rows], labels[rows]]


def assemble_sites(
    folder: Path,
    recipe: Recipe,
    names: Sequence[str],
    secret: bytes | None = None,
    validation_fraction: float = 0.0,
) -> tuple[Assembly, Clients]:
    """A simulation of the same training with these sites, over the rows in `folder`."""
    parts = {name: read_site_rows(folder, name, validation_fraction, 0) for name in names}
    inputs, labels = (np.concatenate([parts[name][side] for name in names]) for side in (0, 1))
    owner = np.repeat(names, [len(parts[name][1]) for name in names])
    clients = Clients.from_arrays(inputs, labels, owner, np.array([SITES[name] for name in owner]))
    return assemble_training(recipe, Linear().build(inputs.shape[1:], recipe.seed), clients, secret), clients


def extract_weights(recipe: Recipe, last: Round) -> np.ndarray:
    """The weights of the model after a round."""
    return np.asarray(recipe.algorithm.extract_model(last.state.server.shared).weights)


def simulate_weights(folder: Path, method: str, secret: bytes | None = None, **settings: Any) -> np.ndarray:
    """The weights of the same training in one process."""
    recipe = Recipe.of(method, engine="loop", **settings)
    training, _, state = assemble_sites(folder, recipe, list(SITES), secret)[0]
    *_, last = training.rounds(state)
    return extract_weights(recipe, last)


def read_trained_weights(run: Path) -> np.ndarray:
    with np.load(run / "model.npz", allow_pickle=False) as arrays:
        return np.concatenate([arrays[name].reshape(-1) for name in arrays.files])
