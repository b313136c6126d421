"""How clients come into groups: by their label, at random, or as given. Empty clients are left out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedauc import keys
from fedauc.interfaces import Roster
from fedauc.participation._clients import group_labels, nonempty_clients
from fedauc.participation._ragged import ClientLists


def group_by_label(clients: Roster, count: int | None) -> ClientLists:
    """One group per label, in the order of the sorted labels."""
    known = group_labels(clients)
    if known is None:
        raise ValueError("clients carry no group label; use assignment='random' with groups=K, or give a group column")
    names, places = known
    if count not in (None, len(names)):
        raise ValueError(
            f"groups is {count}; the clients carry {len(names)} group labels: use groups={len(names)}, "
            f"or assignment='random' to ignore the labels"
        )
    holding = nonempty_clients(clients)
    return _require_clients(ClientLists(places[holding], holding, len(names)), names.tolist())


def group_at_random(clients: Roster, count: int, seed: int) -> ClientLists:
    """`count` groups whose sizes differ by at most one, dealt from a keyed permutation of the clients."""
    holding = nonempty_clients(clients)
    if count > len(holding):
        raise ValueError(f"groups is {count}; it must be at most the {len(holding)} non-empty clients: lower groups")
    order = keys.sample_indices(len(holding), len(holding), seed, "groups")
    # Position i of the permutation goes to group floor(i * count / N): contiguous parts of nearly equal size.
    return ClientLists(np.arange(len(holding)) * count // len(holding), holding[order], count)


def group_as_given(clients: Roster, groups: Sequence[Sequence[int]]) -> ClientLists:
    """The groups that a user lists: disjoint, and every non-empty client in one of them."""
    owners = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    listed = np.array([client for group in groups for client in group], dtype=np.int64)
    _check_listed(listed, len(clients.sizes))
    holding = nonempty_clients(clients)
    missing = np.setdiff1d(holding, listed)
    if len(missing):
        raise ValueError(f"given leaves out non-empty {_name_clients(missing)}: put each in a group")
    kept = np.isin(listed, holding)
    return _require_clients(ClientLists(owners[kept], listed[kept], len(groups)), list(range(len(groups))))


def _check_listed(listed: np.ndarray, total: int) -> None:
    wrong = listed[(listed < 0) | (listed >= total)]
    if len(wrong):
        raise ValueError(f"given lists client {wrong[0]}; clients run from 0 to {total - 1}: correct the index")
    found, times = np.unique(listed, return_counts=True)
    if len(found) < len(listed):
        raise ValueError(f"given lists {_name_clients(found[times > 1])} more than once: put each client in one group")


def _require_clients(groups: ClientLists, names: list[object]) -> ClientLists:
    hollow = np.flatnonzero(groups.client_counts() == 0)
    if len(hollow):
        raise ValueError(f"group {names[hollow[0]]!r} has no client with data; it must have at least 1: drop the group")
    return groups


def _name_clients(clients: np.ndarray) -> str:
    shown = ", ".join(map(str, clients[:5]))
    word = "client" if len(clients) == 1 else "clients"
    return f"{word} {shown}" + (f" and {len(clients) - 5} more" if len(clients) > 5 else "")
