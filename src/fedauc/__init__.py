"""Federated AUC maximization for clients that take part in cycles."""

from __future__ import annotations

from fedauc.data import Clients, Examples, examples
from fedauc.experiments.config import Config
from fedauc.experiments.fitting import Fitted, fit
from fedauc.experiments.recipe import Recipe
from fedauc.guards import TrainingStopped
from fedauc.version import VERSION as __version__

__all__ = ["Clients", "Config", "Examples", "Fitted", "Recipe", "TrainingStopped", "__version__", "examples", "fit"]
