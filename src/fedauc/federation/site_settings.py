"""The names of a site's settings. An app may read others in its `load_data`, but not one that looks like these."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SITE_SETTINGS = ("data", "state", "policy", "share", "share-auc")


def check_setting_names(names: Iterable[str]) -> None:
    """Refuse a misspelled name: without its policy a site would allow what a site without a policy file allows.

    >>> check_setting_names(["data", "state", "database"])
    >>> check_setting_names(["data", "state", "polcy"])
    Traceback (most recent call last):
    ...
    ValueError: node-config has 'polcy', which no site reads; did you mean 'policy'?
    """
    for name in names:
        similar = difflib.get_close_matches(name.lower().replace("_", "-"), SITE_SETTINGS, n=1, cutoff=0.75)
        if name not in SITE_SETTINGS and similar:
            raise ValueError(f"node-config has {name!r}, which no site reads; did you mean {similar[0]!r}?")
