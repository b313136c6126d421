"""What travelled: counted from the records themselves, so no algorithm has counting code of its own."""

from __future__ import annotations

from typing import NamedTuple

from fedauc.interfaces import Cohort, Download, Upload
from fedauc.trees import Tree, tree_leaves


class Traffic(NamedTuple):
    """Totals of a run so far. `down` is server to clients, `up` is back; `absences` are due clients that were away."""

    rounds: int = 0
    visits: int = 0
    absences: int = 0
    floats_down: int = 0
    floats_up: int = 0
    bytes_down: int = 0
    bytes_up: int = 0


class Ledger:
    """Adds up rounds. A stage's anchor counts once per stage and client, everything else every time it is sent."""

    def __init__(self, traffic: Traffic | None = None, stage: int = -1, anchored: set[int] | None = None) -> None:
        self.traffic = traffic or Traffic()
        self.stage = stage
        self.anchored = anchored or set()

    def restore_from(self, other: Ledger) -> None:
        """Go on where another ledger stood."""
        self.traffic, self.stage, self.anchored = other.traffic, other.stage, set(other.anchored)

    def record_empty_round(self, cohort: Cohort) -> None:
        """A round that nobody came to."""
        self._add_totals(rounds=1, absences=len(cohort.absent))

    def record_round(self, download: Download, upload: Upload, cohort: Cohort) -> None:
        """A round: the order as dispatched, the upload as reduced; every client sent a `mean` of that size."""
        visits = len(cohort.clients)
        fresh = self._count_new_anchors(download, cohort)
        down = [
            visits * n + fresh * m + k
            for n, m, k in zip(
                _count_floats_and_bytes(download.shared),
                _count_floats_and_bytes(download.anchor),
                _count_floats_and_bytes(download.per_client),
                strict=True,
            )
        ]
        up = [
            visits * mean + pool
            for mean, pool in zip(
                _count_floats_and_bytes(upload.mean), _count_floats_and_bytes(upload.pool), strict=True
            )
        ]
        self._add_totals(
            rounds=1,
            visits=visits,
            absences=len(cohort.absent),
            floats_down=down[0],
            floats_up=up[0],
            bytes_down=down[1],
            bytes_up=up[1],
        )

    def _count_new_anchors(self, download: Download, cohort: Cohort) -> int:
        if download.phase.stage != self.stage:
            self.stage, self.anchored = download.phase.stage, set()
        if not tree_leaves(download.anchor):
            return 0
        new = set(cohort.clients) - self.anchored
        self.anchored |= new
        return len(new)

    def _add_totals(self, **amounts: int) -> None:
        old = self.traffic
        self.traffic = old._replace(**{name: getattr(old, name) + amount for name, amount in amounts.items()})


def _count_floats_and_bytes(tree: Tree) -> tuple[int, int]:
    """Floats and bytes of a tree."""
    leaves = tree_leaves(tree)
    return sum(leaf.numel() for leaf in leaves), sum(leaf.numel() * leaf.element_size() for leaf in leaves)
