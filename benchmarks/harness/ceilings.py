"""What this CPU can do at most, measured, and the time below which no contender's round can fall."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from harness.torch_models import build_module
from harness.work import PER_ROUND, WORKLOADS

GEMM, COPY = 1024, 1 << 24
"""A square product's side, and the floats of a copy: 64 MB, more than any cache."""


def measure_ceilings(threads: int) -> dict[str, float]:
    """Float32 matrix products, the largest and those of the MLP's shapes, and copies (read and written bytes)."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    square, rows, weights = torch.rand(GEMM, GEMM), torch.rand(PER_ROUND, 32, 64), torch.rand(PER_ROUND, 64, 128)
    source, target = torch.zeros(COPY), torch.zeros(COPY)
    ceilings = {
        "gemm_gflops": 2e-9 * GEMM**3 / _best_seconds(lambda: square @ square, 3),
        "batched_gemm_gflops": 2e-9 * PER_ROUND * 32 * 64 * 128 / _best_seconds(lambda: torch.bmm(rows, weights), 100),
        "copy_gb_per_s": 2 * 4e-9 * COPY / _best_seconds(lambda: target.copy_(source), 3),
    }
    torch.set_num_threads(before)
    return {name: round(value, 1) for name, value in ceilings.items()}


def compute_floor(workload: str, measured: dict[str, float]) -> dict[str, float]:
    """A round's arithmetic and gathered bytes, and the milliseconds the larger of the two takes at its ceiling."""
    shape = WORKLOADS[workload]
    module, rows = build_module(workload), torch.rand(shape.batch, *shape.input_shape)
    with FlopCounterMode(display=False) as counter:
        F.binary_cross_entropy_with_logits(module(rows)[:, 0], torch.zeros(shape.batch)).backward()
    steps = PER_ROUND * shape.local_steps
    gflop, gigabytes = counter.get_total_flops() * steps * 1e-9, rows.numel() * rows.element_size() * steps * 1e-9
    seconds = max(gflop / measured["gemm_gflops"], gigabytes / measured["copy_gb_per_s"])
    return {"gflop": round(gflop, 4), "gathered_gb": round(gigabytes, 4), "floor_ms": round(seconds * 1e3, 3)}


def _best_seconds(work: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        times.append((time.perf_counter() - start) / calls)
    return min(times)
