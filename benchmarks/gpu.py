"""Side-by-side speed on one GPU: fedauc against an eager loop and against one shared model, on the same work.

    PYTHONPATH=src python benchmarks/gpu.py
    PYTHONPATH=src python benchmarks/gpu.py --workloads resnet18-imagenet-group --contenders fedauc,loop

Ten clients take 16 local steps of 32 images a round, in mixed precision, on synthetic images of CIFAR's shape, cropped
and mirrored on the GPU. A round counts everything: draws, steps, averaging. The loop visits clients one after another
in plain torch, channels last; `shared` is ONE compiled model that takes all clients' images as one batch, which no
federation can, and does not average: a bound for arithmetic, not for launches. `sweep` times the command `fedauc sweep`
with six runs beside the engine alone on the same rounds. The file is written after every row.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedauc.data.augmentation import apply_crops
from fedauc.data.clients import Clients
from fedauc.engines.cuda.engine import GraphedEngine, SharedGraph
from fedauc.engines.draws import Draws
from fedauc.experiments.assembly import Assembly, assemble_training
from fedauc.experiments.recipe import Recipe
from fedauc.models import find_models
from fedauc.version import VERSION

CLIENTS, PER_ROUND, STEPS, BATCH, ROWS = 100, 10, 16, 32, 64
CYCLES = 100
"""Ten rounds a cycle: the run whose length is stated is 1,000 rounds."""

WORKLOADS: dict[str, tuple[str, dict[str, str]]] = {
    "resnet18-imagenet-group": ("resnet18", {"stem": "imagenet", "norm": "group"}),
    "resnet18-cifar-group": ("resnet18", {"stem": "cifar", "norm": "group"}),
    "resnet18-cifar-batch": ("resnet18", {"stem": "cifar", "norm": "batch"}),
    "densenet121": ("densenet121", {"stem": "imagenet", "norm": "batch"}),
}
CAPTURED_ONLY = ("densenet121",)
"""Workloads that are captured without compiling, which takes many minutes for so many layers."""

LEFT_OUT = {
    *((workload, "fedauc-3-seeds") for workload in WORKLOADS if workload != "resnet18-imagenet-group"),
    *((workload, "sweep") for workload in WORKLOADS if workload != "resnet18-imagenet-group"),
    ("densenet121", "shared"),
}
"""Several runs share a graph where the device is not full; one compiled DenseNet takes longer than all the rest."""

CONTENDERS = ("fedauc", "fedauc-3-seeds", "loop", "shared", "sweep")

SWEEP_RATES, SWEEP_SEEDS = ("0.003", "0.01"), (0, 1, 2)
"""`fedauc sweep` of six runs: two learning rates with three seeds each."""


class Timing(NamedTuple):
    """Seconds until the first round had run, and milliseconds of a round at best."""

    setup_s: float
    ms_per_round: float


def make_clients() -> Clients:
    """A hundred clients with 64 images each, a quarter of them positive."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (CLIENTS * ROWS, 3, 32, 32), dtype=np.uint8)
    return Clients.from_arrays(images, np.arange(len(images)) % 4 == 0, client=np.arange(len(images)) // ROWS)


def build_network(workload: str, seed: int) -> nn.Module:
    """The workload's network."""
    name, settings = WORKLOADS[workload]
    return find_models()[name](**settings).build((3, 32, 32), seed)


def _make_recipe(seed: int, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "cycles": CYCLES,
        "groups": 10,
        "per_round": PER_ROUND,
        "local_steps": STEPS,
        "positives": BATCH // 2,
        "negatives": BATCH // 2,
        "learning_rate": 0.01,
        "weight_decay": 1e-4,
        "weighting": "clients",
        "augment": "crop-flip",
        "precision": "mixed",
        "device": "cuda",
        "engine": "loop",
        "seed": seed,
    }
    return Recipe.of("cycp-fedavg", **{**settings, **changes})


def assemble_workload(workload: str, data: Clients, seed: int) -> Assembly:
    """Its parts: FedAvg under the cyclic schedule, whose cohorts and draws all contenders use."""
    return assemble_training(_make_recipe(seed), build_network(workload, seed), data)


def time_engine(workload: str, data: Clients, seeds: int, rounds: int) -> Timing:
    """Everything a round does, through the library's own halves of a round."""
    start = time.perf_counter()
    parts = [assemble_workload(workload, data, seed) for seed in range(seeds)]
    trainings = [part.training for part in parts]
    engines = [
        GraphedEngine(t.algorithm, part.network, data, t.setting, compiled=workload not in CAPTURED_ONLY)
        for t, part in zip(trainings, parts, strict=True)
    ]
    together, states = SharedGraph(engines), [part.start for part in parts]

    def step() -> None:
        opened = [training.open_round(state) for training, state in zip(trainings, states, strict=True)]
        visits = together.visit([None if o.download is None else (o.download, o.cohort) for o in opened])
        states[:] = [
            t.close_round(*pair).state for t, pair in zip(trainings, zip(opened, visits, strict=True), strict=True)
        ]

    step()
    torch.cuda.synchronize()
    return Timing(time.perf_counter() - start, best_milliseconds(step, rounds))


def time_plain_loop(workload: str, data: Clients, rounds: int) -> Timing:
    """One client after another, one step after another, in plain torch."""
    begun = time.perf_counter()
    part = assemble_workload(workload, data, 0)
    training = part.training
    module = build_network(workload, 0).cuda().to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    inputs, labels = data.inputs.cuda(), data.labels.cuda().float()
    draws = Draws(data, training.setting, training.algorithm.objective.batch_kind)
    parameters, buffers = list(module.parameters()), [b for b in module.buffers() if b.is_floating_point()]
    held = [group for group in (parameters, buffers) if group]
    server = [[t.detach().clone() for t in group] for group in held]

    def visit(rows: Tensor, moves: Tensor, shares: Tensor) -> None:
        for step in range(STEPS):
            images, wanted = apply_crops(inputs[rows[step]], moves[step]), labels[rows[step]]
            with torch.autocast("cuda", torch.bfloat16):
                scores = module(images.contiguous(memory_format=torch.channels_last))[:, 0].float()
            loss = (shares * F.softplus((1 - 2 * wanted) * scores)).sum()
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                torch._foreach_mul_(parameters, 1 - 0.01 * 1e-4)
                torch._foreach_add_(parameters, gradients, alpha=-0.01)

    def one_round(number: int) -> None:
        cohort, phase = training.schedule.cohort(number), training.plan.phase(number)
        drawn = draws.draw_cohort(cohort.clients, phase)
        assert drawn.moves is not None
        rows, moves, shares = (
            torch.from_numpy(a).cuda() for a in (drawn.rows.astype(np.int64), drawn.moves, drawn.weights)
        )
        totals = [[torch.zeros_like(t) for t in group] for group in server]
        for position, weight in enumerate(cohort.weights):
            for client_tensors, sent in zip(held, server, strict=True):
                with torch.no_grad():
                    torch._foreach_copy_(client_tensors, sent)
            visit(rows[position], moves[position], shares[position].float())
            for client_tensors, total in zip(held, totals, strict=True):
                with torch.no_grad():
                    torch._foreach_add_(total, client_tensors, alpha=weight)
        for sent, total in zip(server, totals, strict=True):
            torch._foreach_copy_(sent, total)

    one_round(0)
    torch.cuda.synchronize()
    numbers = itertools.count(1)
    return Timing(time.perf_counter() - begun, best_milliseconds(lambda: one_round(next(numbers)), 1, 2))


def time_shared_model(workload: str, data: Clients, rounds: int) -> Timing:
    """One compiled model, all clients' images in one batch."""
    begun = time.perf_counter()
    module = build_network(workload, 0).cuda().to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    inputs, labels, parameters = data.inputs.cuda(), data.labels.cuda().float(), list(module.parameters())
    total = PER_ROUND * BATCH
    index = torch.randint(len(inputs), (STEPS, total), device="cuda")
    moves = torch.randint(9, (STEPS, total, 3), device="cuda").to(torch.uint8).clamp(max=8)

    def loss(rows: Tensor, crops: Tensor) -> Tensor:
        images = apply_crops(inputs.index_select(0, rows), crops).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16):
            scores = module(images)[:, 0].float()
        return F.softplus((1 - 2 * labels.index_select(0, rows)) * scores).mean()

    compiled = torch.compile(loss, dynamic=False)

    def step() -> None:
        for position in range(STEPS):
            gradients = torch.autograd.grad(compiled(index[position], moves[position]), parameters)
            with torch.no_grad():
                torch._foreach_mul_(parameters, 1 - 0.01 * 1e-4)
                torch._foreach_add_(parameters, gradients, alpha=-0.01)

    step()
    torch.cuda.synchronize()
    return Timing(time.perf_counter() - begun, best_milliseconds(step, rounds))


def best_milliseconds(step: Callable[[], object], rounds: int, repeats: int = 3) -> float:
    """Milliseconds of a round: the best of some measurements of several rounds, all launched before any is awaited."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / rounds)
    return 1e3 * min(times)


def measure_agreement(workload: str, data: Clients, device: str = "cuda") -> float:
    """How far the graphed engine's first round is from the reference loop's, in float64, relative to its change."""
    changes = []
    for engine in ("loop", "graphed"):
        recipe = _make_recipe(
            0, engine=engine, device=device, precision="full", dtype="float64", local_steps=1, per_round=2
        )
        training, network, start = assemble_training(recipe, build_network(workload, 0), data)
        if isinstance(training.engine, GraphedEngine):
            training.engine.compiled = False
        models = [
            training.algorithm.extract_model(s.server.shared) for s in (start, next(training.rounds(start)).state)
        ]
        before, after = (nn.utils.parameters_to_vector(network.build_module(model).parameters()) for model in models)
        changes.append(after - before)
    return float((changes[1] - changes[0]).norm() / changes[0].norm())


def measure_ceilings() -> dict[str, float]:
    """bf16 matrix products on random numbers, and copies (read and written bytes), as measured here."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    product, copy = best_milliseconds(lambda: left @ right, 20), best_milliseconds(lambda: target.copy_(source), 20)
    return {"gemm_tflops": 2e-9 * 8192**3 / product, "copy_tb_per_s": 2e-9 * len(source) / product * (product / copy)}


def compute_floor(workload: str, measured: dict[str, float]) -> dict[str, float]:
    """A round's arithmetic and least traffic (every client's weights read and written once a step), at the ceilings."""
    module = build_network(workload, 0)
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(2, 3, 32, 32)).sum().backward()
    tflop = counter.get_total_flops() / 2 * PER_ROUND * STEPS * BATCH * 1e-12
    terabytes = 8 * sum(p.numel() for p in module.parameters()) * PER_ROUND * STEPS * 1e-12
    seconds = max(tflop / measured["gemm_tflops"], terabytes / measured["copy_tb_per_s"])
    return {"tflop": tflop, "weights_tb": terabytes, "floor_ms": 1e3 * seconds}


RUNNERS: dict[str, Callable[[str, Clients, int], Timing]] = {
    "fedauc": lambda workload, data, rounds: time_engine(workload, data, 1, rounds),
    "fedauc-3-seeds": lambda workload, data, rounds: time_engine(workload, data, 3, rounds),
    "loop": time_plain_loop,
    "shared": time_shared_model,
}


def time_sweep(workload: str, data: Clients, rounds: int, cycles: int = CYCLES) -> dict[str, Any]:
    """`fedauc sweep` of six runs as a user types it, beside the engine alone on the same rounds.

    The first cycle, which compiles, is left out on both sides. What the command does beyond the engine's rounds is
    evaluation after every cycle, records, checkpoints and progress bars. `wall_s` is the whole command.
    """
    name, settings = WORKLOADS[workload]
    model = [word for key, value in settings.items() for word in (f"--model.{key}", value)]
    scaled = (data.inputs.float().numpy() / 255 - 0.5) / 0.25
    with tempfile.TemporaryDirectory() as folder:
        parts = {"train": slice(None), "test": slice(0, 1000)}
        for part, rows in parts.items():
            labels, owners = data.labels.numpy()[rows].astype(np.int8), np.arange(len(scaled))[rows] // ROWS
            np.savez(f"{folder}/{part}.npz", x=scaled[rows], y=labels, client=owners)
        command = [sys.executable, "-m", "fedauc", "sweep", "--data", "table", "--data.path", f"{folder}/train.npz"]
        command += ["--data.test", f"{folder}/test.npz", "--data.standardize", "false", "--model", name, *model]
        command += ["--method", "cycp-fedavg", "--cycles", str(cycles), "--groups", "10"]
        command += ["--local-steps", str(STEPS), "--positives", str(BATCH // 2), "--negatives", str(BATCH // 2)]
        command += ["--algorithm.weight-decay", "1e-4", "--augment", "crop-flip", "--precision", "mixed"]
        command += ["--vary", f"learning-rate={','.join(SWEEP_RATES)}", "--seeds", ",".join(map(str, SWEEP_SEEDS))]
        command += ["--device", "cuda", "--out", f"{folder}/sweep"]
        start = time.perf_counter()
        subprocess.run(command, check=True)
        wall = time.perf_counter() - start
        timings = [path.read_text().splitlines() for path in Path(folder, "sweep").rglob("timing.jsonl")]
    seconds = [[json.loads(line)["seconds"] for line in lines] for lines in timings]
    # The seconds of runs that share a graph add up to those on the clock.
    trained = sum(run[-1] - run[0] for run in seconds)
    same_rows = dataclasses.replace(data, inputs=torch.from_numpy(scaled))
    engine = time_engine(workload, same_rows, len(SWEEP_RATES) * len(SWEEP_SEEDS), rounds)
    expected = engine.ms_per_round * 10 * (cycles - 1) / 1e3
    return {
        "workload": workload,
        "contender": "sweep",
        "runs": len(seconds),
        "cycles": cycles,
        "wall_s": round(wall, 1),
        "command_s": round(trained, 1),
        "engine_s": round(expected, 1),
        "command_over_engine": round(trained / expected, 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Race, print the table, write the file."""
    options = _parse_options(arguments)
    data = make_clients()
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    agreements: dict[str, float] = {}
    limits = measure_ceilings()
    report: dict[str, Any] = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name(),
        "versions": {"fedauc": VERSION, "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()},
        "shape": {"per_round": PER_ROUND, "local_steps": STEPS, "batch": BATCH, "precision": "mixed"},
        "ceilings": limits,
        "floors": {workload: compute_floor(workload, limits) for workload in options.workloads},
    }
    for workload in options.workloads:
        timings: dict[str, Timing] = {}
        agreements[workload] = measure_agreement(workload, data)
        print(f"{workload}: the engines' first rounds differ by {agreements[workload]:.1e} in float64", flush=True)
        for contender in options.contenders:
            if (workload, contender) in LEFT_OUT:
                continue
            torch._dynamo.reset()
            torch.cuda.empty_cache()
            try:
                if contender == "sweep":
                    rows.append(time_sweep(workload, data, options.rounds, options.sweep_cycles))
                else:
                    timings[contender] = RUNNERS[contender](workload, data, options.rounds)
                    rows = [row for row in rows if row["workload"] != workload or row["contender"] == "sweep"]
                    rows += _make_rows(workload, timings)
            except (RuntimeError, subprocess.CalledProcessError) as error:
                failed.append(f"{workload}, {contender}: {' '.join(str(error).split()[:40])}")
                print(failed[-1], flush=True)
                continue
            _write_report(options.out, {**report, "agreements": agreements, "rows": rows, "failed": failed})
            _print_row(rows[-1])
    print(f"{report['hardware']}, torch {torch.__version__}; {_format_numbers(limits)}")
    for workload, numbers in report["floors"].items():
        print(f"{workload}: {_format_numbers(numbers)}")
    print(f"written to {options.out}")


def _make_rows(workload: str, timings: dict[str, Timing]) -> list[dict[str, Any]]:
    fedauc, rows = timings.get("fedauc"), []
    for contender, timing in timings.items():
        images = STEPS * BATCH * PER_ROUND * (3 if contender == "fedauc-3-seeds" else 1)
        row = {
            "workload": workload,
            "contender": contender,
            "ms_per_round": round(timing.ms_per_round, 3),
            "images_per_s": round(1e3 * images / timing.ms_per_round),
            "setup_s": round(timing.setup_s, 1),
            "run_s": round(timing.ms_per_round * CYCLES * 10 / 1e3, 1),
            "ratio": round(timing.ms_per_round / fedauc.ms_per_round, 3) if fedauc else None,
        }
        rows.append(row)
    return rows


def _print_row(row: dict[str, Any]) -> None:
    print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


def _format_numbers(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def _write_report(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(report, indent=2) + "\n")
    part.replace(path)


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=list(WORKLOADS))
    parser.add_argument("--contenders", type=lambda text: text.split(","), default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=8, help="rounds per measurement (8)")
    parser.add_argument("--sweep-cycles", type=int, default=CYCLES, help=f"cycles of each run of the sweep ({CYCLES})")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "gpu.json")
    options = parser.parse_args(arguments)
    for known, given in ((WORKLOADS, options.workloads), (CONTENDERS, options.contenders)):
        for name in given:
            if name not in known:
                parser.error(f"{name!r} is not known; choose from {', '.join(known)}")
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; run it on a machine with one")
    return options


if __name__ == "__main__":
    main()
