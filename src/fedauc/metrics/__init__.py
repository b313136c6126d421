"""How good a ranking is: AUC and its uncertainty, for all rows, within groups, and for embeddings.

Every function is pure. Labels are 0 or 1, and there is one score per row; a higher score means more likely positive.
Arrays, lists and tensors on any device are accepted. Ties count one half, so a constant score has an AUC of 0.5. In the
docstrings m and n are the numbers of positives and negatives, and the wins of a pair (x, x') are
1[h > h'] + 1[h = h'] / 2.
"""

from __future__ import annotations

from fedauc.metrics.curves import average_precision, partial_auc
from fedauc.metrics.delong import Interval, PairedTest, delong_interval, delong_test
from fedauc.metrics.embeddings import pair_auc
from fedauc.metrics.groups import group_auc
from fedauc.metrics.ranks import auc

__all__ = [
    "Interval",
    "PairedTest",
    "auc",
    "average_precision",
    "delong_interval",
    "delong_test",
    "group_auc",
    "pair_auc",
    "partial_auc",
]
