"""Sites that change what they send, in the rounds and to the kinds of message that a test names."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedauc.federation.serialization import Payload, pack_payload, unpack_tensors
from fedauc.federation.site import Site
from federation.memory_grid import MemoryGrid, make_sites
from small_federations import held_out, small_federation

Trees = dict[str, tuple[Tensor, ...]]

Change = Callable[[dict[str, Any], Trees], None]
"""Changes the header and the tensors of an answer in place."""


class MisbehavingSite(Site):
    """A real site whose answers of one kind are changed, in some rounds or in all."""

    def __init__(self, site: Site, change: Change, kind: str = "visit", rounds: Collection[int] | None = None) -> None:
        self._site, self._change, self._kind, self._rounds = site, change, kind, rounds

    def answer_message(self, payload: Payload) -> Payload:
        answer = self._site.answer_message(payload)
        header = answer.read_header()
        is_meant = header["kind"] == self._kind and (self._rounds is None or header["round"] in self._rounds)
        if not is_meant:
            return answer
        header.pop("layouts")
        trees: Trees = {name: tuple(leaves) for name, leaves in unpack_tensors(answer).items()}
        self._change(header, trees)
        return pack_payload(header, trees)


def make_misbehaving_grid(
    folder: Path, changes: dict[int, Change], kind: str = "visit", rounds: Collection[int] | None = None
) -> MemoryGrid:
    """The small federation, with held-out rows, and some sites that misbehave."""
    sites = make_sites(small_federation(), folder, held_out())
    for client, change in changes.items():
        name = f"site-{client}"
        sites[name] = MisbehavingSite(sites[name], change, kind, rounds)
    return MemoryGrid(sites)


def scale_update(factor: float) -> Change:
    """Send a multiple of the update."""

    def change(header: dict[str, Any], trees: Trees) -> None:
        trees["mean"] = tuple(factor * leaf for leaf in trees["mean"])

    return change


def shift_scores(shift: float) -> Change:
    """Send other scores."""

    def change(header: dict[str, Any], trees: Trees) -> None:
        trees["pool"] = tuple(leaf + shift for leaf in trees["pool"])

    return change


def claim_rows(header: dict[str, Any], trees: Trees) -> None:
    """Say that the rows have changed."""
    header["class_counts"] = [1000, 1000]


def send_nan(header: dict[str, Any], trees: Trees) -> None:
    """Send an update that is no number."""
    trees["mean"] = tuple(torch.full_like(leaf, torch.nan) for leaf in trees["mean"])
    trees["pool"] = tuple(torch.full_like(leaf, torch.nan) for leaf in trees["pool"])
