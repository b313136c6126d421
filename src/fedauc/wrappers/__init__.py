"""Wrappers change the local steps of any algorithm: one file each. New files are found by name."""

from __future__ import annotations

from fedauc.discovery import find_members
from fedauc.interfaces import Wrapper
from fedauc.wrappers._wrapped import WrappedAlgorithm, unwrap_algorithm, wrap_algorithm

__all__ = ["WrappedAlgorithm", "find_wrappers", "unwrap_algorithm", "wrap_algorithm"]


def find_wrappers() -> dict[str, type[Wrapper]]:
    """Every wrapper by name."""
    return find_members(__name__, Wrapper)
