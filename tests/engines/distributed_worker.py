"""One rank of a distributed run: `torchrun` starts it, and rank 0 writes what all ranks agree on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fedauc import Clients, Recipe
from fedauc.experiments.assembly import assemble_training

SETTINGS: dict[str, Any] = {"cycles": 2, "local_steps": 3, "positives": 3, "negatives": 3, "dtype": "float64"}


def federation() -> Clients:
    """Seven clients of unequal size, one without positives."""
    rng = np.random.default_rng(5)
    client = np.repeat(np.arange(7), [9, 20, 7, 12, 6, 15, 11])
    labels = (rng.random(80) < 0.4) & (client != 3)
    return Clients.from_arrays(rng.normal(size=(80, 4)) + labels[:, None], labels, client=client)


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def outcome(method: str, engine: str, settings: str = "{}") -> dict[str, Any]:
    """Weights, losses and traffic of every round, and every client's memory; `settings` is JSON."""
    recipe = Recipe.of(method, engine=engine, **SETTINGS, **json.loads(settings))
    assembly = assemble_training(recipe, model(), federation())
    rounds = list(assembly.training.rounds(assembly.start))
    client_states = assembly.training.engine.client_states()
    return {
        "weights": [recipe.algorithm.extract_model(r.state.server.shared).weights.tolist() for r in rounds],
        "values": [r.loss_value for r in rounds],
        "traffic": list(rounds[-1].traffic),
        "remembering": sorted(client_states),
    }


def main(method: str, engine: str, path: str, settings: str = "{}") -> None:
    dist.init_process_group("gloo")
    result = outcome(method, engine, settings)
    everywhere: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, result)
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(everywhere))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
