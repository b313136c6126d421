"""An order on its way: how the server writes it and how a site reads it.

The facts of a visit: the run, the client's number, the recipe and the model (both sides build the same algorithm and
network from them), the phase, the totals that the weighting needs, and which visit's memory to start from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedauc.experiments.recipe import Recipe
from fedauc.federation.serialization import Payload, pack_payload, rebuild_tree, unpack_tensors
from fedauc.federation.site_state import SiteState
from fedauc.interfaces import Algorithm, BatchSize, Census, Cohort, Download, Phase, Setting
from fedauc.network import ModuleNetwork
from fedauc.trees import Tree, is_empty, tree_at, tree_leaves


class MissingSiteState(Exception):
    """What a site no longer has ('anchor', 'memory'), and the server must send or give up."""


class ClassTotals(NamedTuple):
    """What a site is told of the others: sites in all and with data, and per class the holders and the rows."""

    clients: int
    nonempty: int
    holders: tuple[int, int]
    rows: tuple[int, int]

    @staticmethod
    def from_census(census: Census) -> ClassTotals:
        """The totals of a census."""
        holders = (int(np.count_nonzero(census.positives)), int(np.count_nonzero(census.negatives)))
        rows = (int(census.positives.sum()), int(census.negatives.sum()))
        nonempty = int(np.count_nonzero(census.positives + census.negatives))
        return ClassTotals(len(census.positives), nonempty, holders, rows)

    def equivalent_census(self, client: int, held: tuple[int, int]) -> Census:
        """A census with these totals and the client's own rows: all that a weighting can tell from the true one.

        >>> Totals(3, 3, (2, 3), (7, 30)).census(1, (3, 10))
        Census(positives=array([4, 3, 0]), negatives=array([19, 10,  1]))
        """
        others = [place for place in range(self.clients) if place != client][: self.nonempty - (sum(held) > 0)]
        sides = []
        for side, own in enumerate(held):
            counts = np.zeros(self.clients, dtype=np.int64)
            counts[client] = own
            holding = self.holders[side] - (own > 0)
            # Positives from the front, negatives from the back: then every other site holds something.
            chosen = others[:holding] if side == 0 else others[len(others) - holding :]
            counts[chosen] = 1
            if chosen:
                counts[chosen[0]] += self.rows[side] - own - len(chosen)
            sides.append(counts)
        return Census(*sides)


def pack_visit(facts: dict[str, Any], download: Download, place: int, accepted: int, anchored: bool) -> Payload:
    """The parcel for the cohort's client at a place; a stage's reference goes along unless the site has it."""
    anchor = "none" if is_empty(download.anchor) else "kept" if anchored else "sent"
    own: dict[str, Any] = {
        "kind": "visit",
        "phase": phase_to_json(download.phase),
        "accepted": accepted,
        "anchor": anchor,
    }
    trees = {"shared": download.shared, "own": tree_at(download.per_client, place)}
    if anchor == "sent":
        trees["anchor"] = download.anchor
    return pack_payload({**facts, **own}, trees)


def unpack_download(
    algorithm: Algorithm, setting: Setting, network: ModuleNetwork, phase: Phase, parcel: Payload, drawer: SiteState
) -> Download:
    """The order in a parcel. Its structure is what `dispatch` makes of a fresh server: no structure travels."""
    server = algorithm.init(setting, network.state())
    like = algorithm.dispatch(setting, server, Cohort(phase.round, (0,), (1.0,)), phase)
    found = unpack_tensors(parcel)
    shared = rebuild_tree(found["shared"], like.shared, "shared")
    own = rebuild_tree(found["own"], like.per_client, "own", shapes=False)
    for leaf in tree_leaves(own):
        if leaf.ndim == 0 or len(leaf) != phase.local_steps:
            raise ValueError(f"own has shape {tuple(leaf.shape)}; it must have {phase.local_steps} local steps")
    return Download(
        phase, shared, _anchor(parcel.read_header()["anchor"], like.anchor, found, phase.stage, drawer), own
    )


def _anchor(word: str, like: Tree, found: dict[str, Any], stage: int, drawer: SiteState) -> Tree:
    """The stage's reference: in the parcel the first time, in the drawer from then on."""
    name = f"anchor-{stage}"
    if word == "sent":
        anchor = rebuild_tree(found["anchor"], like, "anchor")
        for old in [old for old in drawer.list_names() if old.startswith("anchor-") and old != name]:
            drawer.delete_payload(old)
        drawer.save_payload(name, pack_payload({}, {"anchor": anchor}))
        return anchor
    if word == "none":
        return ()
    kept = drawer.load_payload(name)
    if kept is None:
        raise MissingSiteState("anchor")
    return rebuild_tree(unpack_tensors(kept)["anchor"], like, "anchor")


def build_setting(facts: dict[str, Any], recipe: Recipe, held: tuple[int, int]) -> Setting:
    """The run's setting as a site may know it."""
    clients, nonempty, holders, rows = facts["totals"]
    totals = ClassTotals(clients, nonempty, (holders[0], holders[1]), (rows[0], rows[1]))
    census = totals.equivalent_census(facts["client"], held)
    return Setting(recipe.seed, facts["cycle_length"], recipe.batch, census, recipe.weighting, recipe.augment)


def phase_from_json(plain: dict[str, Any]) -> Phase:
    """A phase from its plain numbers."""
    return Phase(**{**plain, "batch": BatchSize(*plain["batch"])})


def phase_to_json(phase: Phase) -> dict[str, Any]:
    """A phase as plain JSON values."""
    return {**phase._asdict(), "batch": list(phase.batch), "learning_rate": float(phase.learning_rate)}
