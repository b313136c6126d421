"""What happens to an upload on its way from a client to the server's state, and how a cohort's uploads become one."""

from __future__ import annotations

from fedauc.discovery import find_members
from fedauc.interfaces import Mean, UploadTransform


def find_transforms() -> dict[str, type[UploadTransform]]:
    """Every upload transform, by name."""
    return find_members(__name__, UploadTransform)


def find_means() -> dict[str, type[Mean]]:
    """Every mean, by name."""
    return find_members(__name__, Mean)  # type: ignore[type-abstract]
