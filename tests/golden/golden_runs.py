"""Small runs whose records and models are compared to the bit with those of an earlier version.

`python tests/golden/golden_runs.py record NAME` writes `NAME.json`, where NAME is one of `SUITES`;
`python tests/golden/golden_runs.py check NAME` compares and prints what differs. `test_golden_runs.py` does the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fedauc.algorithms import find_methods
from fedauc.data.datasets.synthetic import Synthetic
from fedauc.experiments.assembly import assemble_training
from fedauc.experiments.config import Config
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.runner import Run
from fedauc.models.mlp import MLP
from federation.memory_grid import create_run, make_agreement, make_grid
from small_federations import held_out, linear_scorer, small_federation

HERE = Path(__file__).parent

Digest = dict[str, Any]
"""Hashes of a run's records and model, and three readable numbers for machines that round differently."""

VARIANTS: dict[str, dict[str, Any]] = {
    "cycp-pairwise round mean": {"method": "cycp-pairwise", "stage_output": "round_mean", "stages": "geometric"},
    "cycp-pairwise pooled": {"method": "cycp-pairwise", "weighting": "pooled", "objective": "barrier-hinge"},
    "cycp-minimax cycle mean": {
        "method": "cycp-minimax",
        "stage_output": "cycle_mean",
        "prox": 0.1,
        "score": "sigmoid",
    },
    "cycp-fedavg paper weighting": {"method": "cycp-fedavg", "weighting": "paper", "weight_decay": 0.01},
    "a-scaffold float64": {"method": "a-scaffold", "dtype": "float64"},
}
"""Options beyond the methods' defaults."""


RECORDED_DEFAULTS = {"weighting": "clients"}
"""What was the default when the runs were recorded, and no longer is."""


def settings(name: str) -> dict[str, Any]:
    """The recipe's settings of a named run: a method with its defaults, or a variant."""
    chosen = dict(VARIANTS.get(name, {"method": name}))
    if "score" in chosen:
        from fedauc.objectives.minimax import Minimax

        chosen["objective"] = Minimax(score=chosen.pop("score"))
    if "objective" in chosen and isinstance(chosen["objective"], str):
        from fedauc.objectives import find_objectives

        chosen["objective"] = find_objectives()[chosen["objective"]]()
    sizes = {"cycles": 4, "local_steps": 3, "positives": 4, "negatives": 5, "seed": 3}
    return {**sizes, **RECORDED_DEFAULTS, **chosen}


def simulate(engine: str, names: list[str], device: str = "cpu", **changes: Any) -> dict[str, Digest]:
    """Runs into folders, with one engine."""
    digests = {}
    for name in names:
        recipe = Recipe.of(engine=engine, device=device, **settings(name), **changes)
        config = Config(recipe=recipe, data=Synthetic(clients=12, rows_per_client=40), model=MLP())
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run"
            Run.create(config, path).train_to_end()
            lines = [json.loads(line) for line in (path / "records.jsonl").read_text().splitlines()]
            weights = torch.load(path / "model.pt", weights_only=True, map_location="cpu")
            digests[name] = digest(lines, {key: value.numpy() for key, value in weights.items()})
    return digests


def federate(names: list[str]) -> dict[str, Digest]:
    """Runs across sites in memory, with the server's folder."""
    digests = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run"
            agreement = make_agreement(name, {"evaluation": "histograms"}, participation="cyclic", **RECORDED_DEFAULTS)
            grid = make_grid(Path(folder) / "sites", test=held_out())
            create_run(agreement, grid, path).train_to_end()
            lines = [json.loads(line) for line in (path / "records.jsonl").read_text().splitlines()]
            digests[name] = digest(lines, dict(np.load(path / "model.npz")))
    return digests


def distribute(names: list[str]) -> dict[str, Digest]:
    """Runs on two processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, "rank"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        done = subprocess.run([*launch, str(path), *names], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        digests: dict[str, Digest] = json.loads(path.read_text())
    return digests


def run_rank(path: str, names: list[str]) -> None:
    """What each of the two processes does; rank 0 writes."""
    dist.init_process_group("gloo")
    digests = {}
    for name in names:
        rows = {"positives": 3, "negatives": 3, **RECORDED_DEFAULTS}
        recipe = Recipe.of(name, cycles=2, local_steps=3, dtype="float64", engine="batched", **rows)
        assembly = assemble_training(recipe, linear_scorer(), small_federation())
        rounds = list(assembly.training.rounds(assembly.start))
        lines = [{"value": done.loss_value, **done.traffic._asdict()} for done in rounds]
        model = recipe.algorithm.extract_model(rounds[-1].state.server.shared)
        digests[name] = digest(lines, {"weights": model.weights.numpy()})
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(digests))
    dist.destroy_process_group()


def digest(records: list[dict[str, Any]], model: dict[str, np.ndarray]) -> Digest:
    """Names do not count, so that a field may be renamed; values and their order do."""
    values = [[v.hex() if isinstance(v, float) else str(v) for v in line.values()] for line in records]
    weights = hashlib.sha256()
    for array in model.values():
        weights.update(np.ascontiguousarray(array).tobytes())
    flat = np.concatenate([array.ravel().astype(np.float64) for array in model.values()])
    return {
        "records": hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16],
        "model": weights.hexdigest()[:16],
        "count": len(records),
        "norm": float(np.linalg.norm(flat)),
        "sum": float(flat.sum()),
    }


def environment() -> dict[str, str]:
    """What the last bits of a result depend on."""
    versions = {"torch": torch.__version__, "numpy": np.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    if torch.cuda.is_available():
        versions["gpu"] = torch.cuda.get_device_name()
    return versions


def method_names() -> list[str]:
    """All methods."""
    return sorted(find_methods())


def recorded_names(suite: str) -> list[str]:
    """The methods that a suite has recorded; on a GPU these may be fewer than there are."""
    return sorted(json.loads((HERE / f"{suite}.json").read_text())["runs"])


SUITES: dict[str, Any] = {
    "loop": lambda: simulate("loop", [*method_names(), *VARIANTS]),
    "batched": lambda: simulate("batched", [*method_names(), *VARIANTS]),
    "compiled": lambda: simulate("compiled", method_names()),
    "distributed": lambda: distribute(method_names()),
    "federation": lambda: federate(method_names()),
    "graphed": lambda: simulate("graphed", recorded_names("graphed"), "cuda"),
}


def run_suite(name: str) -> dict[str, Digest]:
    """The runs of a suite, on one thread: sums over more threads round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        digests: dict[str, Digest] = SUITES[name]()
    finally:
        torch.set_num_threads(threads)
    return digests


def differences(name: str) -> Iterator[str]:
    """What differs between the recorded runs of a suite and new ones: bits here, four digits on other machines.

    The hashes say whether the bits are the same; norms and sums of the same bits depend on numpy's own instructions. On
    a GPU the same code does not always give the same last bits (seen with a-fedavg), so four digits must do there.
    """
    stored = json.loads((HERE / f"{name}.json").read_text())
    same, runs = stored["environment"] == environment() and name != "graphed", run_suite(name)
    if sorted(runs) != sorted(stored["runs"]):
        yield f"runs are {sorted(runs)}, recorded are {sorted(stored['runs'])}"
    for run, expected in stored["runs"].items():
        for key, value in runs.get(run, {}).items():
            close = isinstance(value, float) and abs(value - expected[key]) <= 1e-4 * (1 + abs(value))
            if value != expected[key] and not close and (same or not isinstance(value, str)):
                yield f"{name}, {run}: {key} is {value}, recorded is {expected[key]}"


def main(verb: str, *names: str) -> None:
    """Record or check suites."""
    if verb == "rank":
        run_rank(names[0], list(names[1:]))
        return
    for name in names:
        if verb == "record":
            target = Path(os.environ.get("OUT", HERE)) / f"{name}.json"
            target.write_text(json.dumps({"environment": environment(), "runs": run_suite(name)}, indent=1) + "\n")
            continue
        differing = list(differences(name))
        print(f"{name}: {len(differing)} differences", *differing, sep="\n  ")


if __name__ == "__main__":
    main(*sys.argv[1:])
