"""Models: frozen configurations that build networks, one file each."""

from __future__ import annotations

from fedauc.discovery import find_members
from fedauc.models.model import ModelConfig

__all__ = ["ModelConfig", "find_models"]


def find_models() -> dict[str, type[ModelConfig]]:
    """Every model by name."""
    return find_members("fedauc.models", ModelConfig)  # type: ignore[type-abstract]
