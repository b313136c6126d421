"""The message that asks a site for a visit: how the server writes it and how the site reads it.

Its header holds the run, the client's number, the recipe and the model (both sides build the same algorithm and network
from them), the phase, the class totals that the weighting needs, and the visit whose client state is to be used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fedauc.class_totals import ClassTotalsEstimate
from fedauc.experiments.memory_needs import check_draw_memory
from fedauc.experiments.recipe import Recipe
from fedauc.federation.serialization import Payload, pack_payload, rebuild_tree, unpack_tensors
from fedauc.federation.site_state import SiteState, load_anchor, save_anchor
from fedauc.interfaces import Algorithm, BatchSize, Census, Cohort, Download, Phase, Setting
from fedauc.network import ModuleNetwork
from fedauc.stages import MAX_LOCAL_STEPS
from fedauc.trees import Tree, is_empty, tree_at, tree_leaves
from fedauc.uploads import UploadPipeline

MAX_SITES = 10_000_000
"""More sites than this in a message are taken for damage."""


class ClassTotals(NamedTuple):
    """What a site learns about the others: sites in all and with data, and per class the holders and the rows."""

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

    def equivalent_census(self, client: int, class_counts: tuple[int, int]) -> Census:
        """A census with these totals and the client's own counts: no weighting can tell it from the true one.

        >>> ClassTotals(3, 3, (2, 3), (7, 30)).equivalent_census(1, (3, 10))
        Census(positives=array([4, 3, 0]), negatives=array([19, 10,  1]))
        """
        others = [number for number in range(self.clients) if number != client]
        others = others[: self.nonempty - (sum(class_counts) > 0)]
        columns = []
        for side, count in enumerate(class_counts):
            column = np.zeros(self.clients, dtype=np.int64)
            column[client] = count
            holders = self.holders[side] - (count > 0)
            # Positives from the front and negatives from the back, so that every other site holds something.
            chosen = others[:holders] if side == 0 else others[len(others) - holders :]
            column[chosen] = 1
            if chosen:
                column[chosen[0]] += self.rows[side] - count - len(chosen)
            columns.append(column)
        return Census(*columns)


def pack_visit(
    header: dict[str, Any], download: Download, position: int, last_accepted_round: int, has_anchor: bool
) -> Payload:
    """The message for the client at a position of the cohort; it includes the anchor unless the site has it."""
    anchor = "none" if is_empty(download.anchor) else "stored" if has_anchor else "included"
    trees = {"shared": download.shared, "per_client": tree_at(download.per_client, position)}
    if not is_empty(download.announced):
        trees["announced"] = download.announced
    if anchor == "included":
        trees["anchor"] = download.anchor
    visit = {"phase": phase_to_json(download.phase), "last_accepted_round": last_accepted_round, "anchor": anchor}
    return pack_payload({**header, "kind": "visit", **visit}, trees)


def unpack_download(
    algorithm: Algorithm,
    uploads: UploadPipeline,
    setting: Setting,
    network: ModuleNetwork,
    phase: Phase,
    payload: Payload,
    store: SiteState,
) -> Download:
    """The download in a message. Its structure is that of a download that `dispatch` makes: no structure travels."""
    server = algorithm.init(setting, network.initial_model())
    template = algorithm.dispatch(setting, server, Cohort(phase.round, (0,), (1.0,)), phase)
    tensors = unpack_tensors(payload)
    shared = rebuild_tree(tensors["shared"], template.shared, "shared")
    per_client = rebuild_tree(tensors["per_client"], template.per_client, "per_client", check_shapes=False)
    for leaf in tree_leaves(per_client):
        if leaf.ndim == 0 or len(leaf) != phase.local_steps:
            raise ValueError(f"per_client has shape {tuple(leaf.shape)}; it must have {phase.local_steps} local steps")
    anchor: Tree
    match payload.read_header()["anchor"]:
        case "none":
            anchor = ()
        case "included":
            anchor = rebuild_tree(tensors["anchor"], template.anchor, "anchor")
            save_anchor(store, phase.stage, anchor)
        case _:
            anchor = load_anchor(store, phase.stage, template.anchor)
    announced = uploads.announce_state(uploads.initial_server_state(server.shared))
    if not is_empty(announced):
        announced = rebuild_tree(tensors["announced"], announced, "announced")
    return Download(phase, shared, anchor, per_client, announced)


def describe_totals(setting: Setting, is_private: bool) -> dict[str, Any]:
    """What a visit's header says of all sites' class counts: exact totals, or what a private run has released."""
    exact = ClassTotals.from_census(setting.census)
    if setting.totals is not None:
        return {"class_totals": [exact.clients, exact.nonempty], "released_totals": list(setting.totals)}
    if is_private and setting.weighting == "paper":
        # This weighting needs no totals, so none are sent.
        released = ClassTotalsEstimate(exact.nonempty)
        return {"class_totals": [exact.clients, exact.nonempty], "released_totals": list(released)}
    return {"class_totals": exact}


def build_setting(header: dict[str, Any], recipe: Recipe, class_counts: tuple[int, int]) -> Setting:
    """The run's setting, as far as a site may know it."""
    client, totals = header["client"], None
    _check_client_count(header["class_totals"][0], client)
    if "released_totals" in header:
        clients, holders, rows, max_rows = header["released_totals"]
        totals = ClassTotalsEstimate(clients, holders and tuple(holders), rows and tuple(rows), max_rows)
        clients_total, nonempty = header["class_totals"]
        census = _hidden_census(clients_total, nonempty, client, class_counts)
    else:
        census = ClassTotals(*header["class_totals"]).equivalent_census(client, class_counts)
    setting = Setting(recipe.seed, header["cycle_length"], recipe.batch, census, recipe.weighting, recipe.augment)
    return replace(setting, totals=totals)


def _check_client_count(clients: Any, client: Any) -> None:
    """Refuse numbers of clients that no federation has, before a column of that length is made."""
    if type(clients) is not int or not 1 <= clients <= MAX_SITES:
        raise ValueError(f"the message speaks of {clients!r} sites; there may be 1 to {MAX_SITES}")
    if type(client) is not int or not 0 <= client < clients:
        raise ValueError(f"the message numbers this site {client!r}; it must be below {clients}")


def _hidden_census(clients: int, nonempty: int, client: int, class_counts: tuple[int, int]) -> Census:
    """A census of which a site knows its own counts, and how many other sites hold rows."""
    others = [number for number in range(clients) if number != client][: nonempty - (sum(class_counts) > 0)]
    columns = []
    for count in class_counts:
        column = np.zeros(clients, dtype=np.int64)
        column[others], column[client] = 1, count
        columns.append(column)
    return Census(*columns)


def phase_to_json(phase: Phase) -> dict[str, Any]:
    """A phase as plain JSON values."""
    return {**phase._asdict(), "batch": list(phase.batch), "learning_rate": float(phase.learning_rate)}


def phase_from_json(values: dict[str, Any]) -> Phase:
    """The phase that `phase_to_json` wrote; one that needs more memory than this machine has is refused."""
    phase = Phase(**{**values, "batch": BatchSize(*values["batch"])})
    numbers = {"local_steps": phase.local_steps, "positives": phase.batch.positives, "negatives": phase.batch.negatives}
    for name, number in numbers.items():
        if type(number) is not int or number < 0 or (name == "local_steps" and number > MAX_LOCAL_STEPS):
            raise ValueError(f"the message asks for {number!r} as {name}; it must be a count of a possible size")
    check_draw_memory(1, phase.local_steps, phase.batch)
    return phase
