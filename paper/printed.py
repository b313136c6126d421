"""The numbers that the paper prints: test AUC, mean and standard deviation of three runs.

From Vangapally, Wu, Chen and Guo, Communication-Efficient Federated AUC Maximization with Cyclic Client Participation,
TMLR 01/2026: Tables 1 to 5, 8 and 9. Its figures come without numbers. Columns are in the paper's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from paper.table_specs import METHODS, PUBLISHED


class Printed(NamedTuple):
    """A mean and a standard deviation."""

    mean: float
    deviation: float


_TABLES = {
    "table1": """
        cifar10     cifar100    chestmnist  insurance
        .7836 .0020 .8894 .0012 .6012 .0016 .7339 .0035
        .7950 .0014 .9137 .0028 .5994 .0025 .7384 .0030
        .7993 .0018 .9105 .0017 .6015 .0022 .7412 .0021
        .8153 .0025 .9392 .0029 .5697 .0031 .7419 .0013
        .8357 .0012 .9688 .0010 .6118 .0020 .7619 .0011
        .8446 .0015 .9318 .0014 .6163 .0026 .7616 .0017
        .8480 .0008 .9694 .0013 .6256 .0015 .7778 .0002""",
    "table2": """
        cifar10     cifar100    chestmnist  insurance
        .7739 .0031 .8781 .0019 .5927 .0008 .7292 .0029
        .7891 .0020 .8951 .0023 .5901 .0013 .7298 .0035
        .7950 .0025 .9066 .0024 .5987 .0011 .7307 .0036
        .8170 .0021 .9185 .0019 .5587 .0026 .7517 .0038
        .8201 .0017 .9480 .0020 .6004 .0009 .7173 .0043
        .8316 .0006 .9275 .0015 .6150 .0007 .7505 .0041
        .8424 .0038 .9455 .0020 .6077 .0012 .7722 .0018""",
    "table3": """
        dir0.1-flip0 dir0.1-flip0.2 dir10-flip0 dir10-flip0.2
        .7581 .0023 .6800 .0030 .8227 .0025 .8199 .0019
        .7732 .0029 .7015 .0028 .8354 .0033 .8254 .0015
        .7815 .0016 .7119 .0024 .8336 .0019 .8315 .0011
        .7976 .0021 .8083 .0025 .8154 .0031 .8086 .0016
        .8059 .0014 .7712 .0027 .8304 .0032 .8217 .0023
        .8184 .0018 .8095 .0017 .8702 .0023 .8511 .0008
        .8283 .0012 .7828 .0020 .8626 .0027 .8540 .0014""",
    "table4": """
        dir0.1-flip0 dir0.1-flip0.2 dir10-flip0 dir10-flip0.2
        .9203 .0009 .8774 .0018 .9587 .0025 .9363 .0024
        .9230 .0014 .8825 .0026 .9605 .0030 .9402 .0023
        .9199 .0021 .8906 .0015 .9627 .0027 .9421 .0016
        .9216 .0011 .9123 .0022 .9520 .0018 .9266 .0030
        .9243 .0015 .9180 .0024 .9601 .0017 .9475 .0026
        .9299 .0013 .9148 .0017 .9610 .0023 .9564 .0019
        .9308 .0016 .9123 .0028 .9669 .0015 .9525 .0021""",
    "table5": """
        dir0.1-flip0 dir0.1-flip0.2 dir10-flip0 dir10-flip0.2
        .5584 .0006 .5329 .0003 .6561 .0013 .6197 .0017
        .5580 .0004 .5334 .0006 .6572 .0015 .6201 .0013
        .5573 .0004 .5341 .0002 .6568 .0016 .6233 .0019
        .5245 .0011 .5155 .0004 .6541 .0008 .6232 .0017
        .5502 .0007 .5338 .0009 .6545 .0012 .6293 .0014
        .5553 .0010 .5362 .0005 .6431 .0012 .6318 .0018
        .5598 .0009 .5498 .0004 .6595 .0010 .6356 .0023""",
    "table8": """
        cifar10-50  cifar10-200 cifar100-50 cifar100-200
        .7227 .0015 .7846 .0011 .8817 .0020 .8920 .0018
        .7418 .0026 .7923 .0016 .8756 .0025 .8973 .0012
        .7450 .0024 .7940 .0013 .8866 .0017 .9012 .0015
        .7572 .0018 .8012 .0006 .8994 .0013 .9183 .0013
        .7721 .0014 .8225 .0010 .9188 .0012 .9422 .0021
        .8209 .0012 .8478 .0016 .9275 .0022 .9365 .0016
        .8367 .0013 .8448 .0017 .9647 .0015 .9653 .0019""",
    "table9": """
        cifar10     cifar100
        .8083 .0175 .8815 .0073
        .8123 .0037 .9006 .0052
        .8208 .0041 .9016 .0039
        .8225 .0028 .9342 .0044
        .8303 .0019 .9541 .0037
        .8460 .0060 .9422 .0029
        .8503 .0048 .9730 .0055""",
}


def printed(sheet: str) -> Mapping[tuple[str, str], Printed]:
    """What the paper prints for a row and column of a table; nothing for what it does not have.

    >>> printed("table1")["cycp-pairwise", "cifar10"]
    Printed(mean=0.848, deviation=0.0008)
    """
    if sheet == "classes":
        # The class of Table 1 is not named: it may be any of them.
        return {key: number for key, number in printed("table1").items() if key[1] in PUBLISHED[:2]}
    if sheet not in _TABLES:
        return {}
    head, *lines = _TABLES[sheet].strip().splitlines()
    found = {}
    for method, line in zip(METHODS, lines, strict=True):
        numbers = [float(number) for number in line.split()]
        for column, *pair in zip(head.split(), numbers[::2], numbers[1::2], strict=True):
            found[method, column] = Printed(*pair)
    return found
