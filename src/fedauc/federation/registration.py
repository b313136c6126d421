"""Before a run: every site registers its class counts and the shape of its rows. This is all a server learns of them.

The result is stored as census.json in the run's folder, so that a resumed run starts from the same counts.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch

from fedauc.data.clients import Clients
from fedauc.federation.exchange import Exchange, read_answer
from fedauc.federation.serialization import Payload, pack_payload
from fedauc.guards import TrainingStopped
from fedauc.interfaces import Census

CENSUS_FILE = "census.json"


class RegisteredSites(NamedTuple):
    """What the server knows of all sites' data. The run's id separates the states that sites keep for several runs."""

    run_id: str
    census: Census
    shape: tuple[int, ...]
    dtype: str

    def to_json(self) -> dict[str, Any]:
        """Plain values for census.json."""
        counts = {"positives": self.census.positives.tolist(), "negatives": self.census.negatives.tolist()}
        return {"run": self.run_id, **counts, "shape": list(self.shape), "dtype": self.dtype}

    @staticmethod
    def read_json(folder: Path) -> RegisteredSites:
        """Read census.json of a run's folder."""
        stored = json.loads((folder / CENSUS_FILE).read_text())
        census = Census(np.array(stored["positives"]), np.array(stored["negatives"]))
        return RegisteredSites(stored["run"], census, tuple(stored["shape"]), stored["dtype"])

    def placeholder_clients(self, census: Census, groups: np.ndarray | None = None) -> Clients:
        """Clients with these class counts and two rows of zeros, a positive and a negative, to try the model on."""
        dtype = torch.uint8 if self.dtype == "uint8" else torch.float32
        inputs = torch.zeros((2, *self.shape), dtype=dtype)
        names = np.arange(len(census.positives))
        offsets = np.concatenate([[0], np.full(len(names), 2)])
        return Clients(inputs, torch.tensor([1.0, 0.0]), np.arange(2), offsets, census, names, groups)


def register_sites(exchange: Exchange) -> RegisteredSites:
    """Ask every site for its class counts; a site that does not answer counts as one without rows in this run."""
    messages = {client: lambda: pack_payload({"kind": "register"}) for client in range(len(exchange.sites))}
    seconds, names = exchange.policy.registration_deadline, [site.name for site in exchange.sites]
    result = exchange.ask_sites(messages, lambda client, payload: _read_registration(payload), seconds=seconds)
    if not result.answers:
        reasons = {names[client]: reason for client, reason in {**result.absent, **result.refused}.items()}
        raise TrainingStopped(f"no site has answered within {seconds:g} s: {reasons}; start some sites")
    first = min(result.answers)
    _, first_shape, first_dtype = result.answers[first]
    counts = np.zeros((2, len(names)), dtype=np.int64)
    for client, (class_counts, shape, dtype) in sorted(result.answers.items()):
        if (shape, dtype) != (first_shape, first_dtype):
            shapes = f"has rows {dtype} {shape}, site {names[first]!r} has {first_dtype} {first_shape}"
            raise ValueError(f"site {names[client]!r} {shapes}; give all sites the same features")
        counts[:, client] = class_counts
    if not counts.sum(axis=1).all():
        raise ValueError(f"the sites hold {counts[0].sum()} positives and {counts[1].sum()} negatives; both are needed")
    return RegisteredSites(secrets.token_hex(8), Census(*counts), first_shape, first_dtype)


def _read_registration(payload: Payload) -> tuple[list[int], tuple[int, ...], str]:
    """A site's number of rows of each class, the shape of a row, and whether rows are bytes or floats."""
    header = read_answer(payload, "register")
    counts, shape, dtype = (header.get(key) for key in ("class_counts", "shape", "dtype"))
    if not _are_integers(counts, minimum=0) or len(counts) != 2:
        raise ValueError(f"class_counts is {counts!r}; it must be two counts")
    if not _are_integers(shape, minimum=1) or not shape or dtype not in ("uint8", "float"):
        raise ValueError(f"a row is {dtype!r} {shape!r}; it must be uint8 or float, with sizes of at least 1")
    return counts, tuple(shape), str(dtype)


def _are_integers(values: Any, minimum: int) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= minimum for value in values)
