"""Traffic: counted from downloads and uploads themselves, so that no algorithm needs counting code."""

from __future__ import annotations

from typing import NamedTuple

from fedauc.interfaces import Cohort, Download, Upload, UploadSize
from fedauc.trees import Tree, tree_leaves


class Traffic(NamedTuple):
    """Totals of a run so far. `down` is server to clients, `up` is back; `absences` count absent clients."""

    rounds: int = 0
    visits: int = 0
    absences: int = 0
    floats_down: int = 0
    floats_up: int = 0
    bytes_down: int = 0
    bytes_up: int = 0


class Ledger:
    """Adds up the traffic of rounds. A stage's anchor counts once per stage and client, all else each time."""

    def __init__(self, traffic: Traffic | None = None, stage: int = -1, anchored: set[int] | None = None) -> None:
        self.traffic = traffic or Traffic()
        self.stage = stage
        self.anchored = anchored or set()

    def restore_from(self, saved: Ledger) -> None:
        """Continue from where another ledger stood."""
        self.traffic, self.stage, self.anchored = saved.traffic, saved.stage, set(saved.anchored)

    def record_preparation(self, floats_down: int, floats_up: int, bytes_down: int, bytes_up: int) -> None:
        """Count what sites and server have sent before the first round, to prepare features."""
        self._add_totals(
            Traffic(floats_down=floats_down, floats_up=floats_up, bytes_down=bytes_down, bytes_up=bytes_up)
        )

    def record_empty_round(self, cohort: Cohort) -> None:
        """Count a round without clients."""
        self._add_totals(Traffic(rounds=1, absences=len(cohort.absent)))

    def record_round(self, download: Download, upload: Upload, cohort: Cohort, sent: UploadSize | None = None) -> None:
        """Count a round: the download as dispatched, and the upload as sent.

        Where `sent` is None, nothing has changed the uploads: each client sent a `mean` of the reduced one's size.
        """
        if download.phase.stage != self.stage:
            self.stage, self.anchored = download.phase.stage, set()
        newly_anchored = set(cohort.clients) - self.anchored if tree_leaves(download.anchor) else set()
        self.anchored |= newly_anchored
        visits, anchors = len(cohort.clients), len(newly_anchored)
        sent_to_all = (download.shared, download.announced)
        trees = (sent_to_all, download.anchor, download.per_client, upload.mean, upload.pool)
        shared, anchor, per_client, mean, pool = map(_count_floats_and_bytes, trees)
        # Sites that were due and did not come have a part of `per_client` as well, which does not count.
        due = len(next(iter(tree_leaves(download.per_client)), ())) or 1
        per_visit = [shared[unit] + per_client[unit] // due for unit in range(2)]
        down = [visits * per_visit[unit] + anchors * anchor[unit] for unit in range(2)]
        up = sent or [visits * mean[unit] + pool[unit] for unit in range(2)]
        self._add_totals(Traffic(1, visits, len(cohort.absent), down[0], up[0], down[1], up[1]))

    def _add_totals(self, traffic: Traffic) -> None:
        self.traffic = Traffic(*(total + amount for total, amount in zip(self.traffic, traffic, strict=True)))


def _count_floats_and_bytes(tree: Tree) -> tuple[int, int]:
    leaves = tree_leaves(tree)
    return sum(leaf.numel() for leaf in leaves), sum(leaf.numel() * leaf.element_size() for leaf in leaves)
