"""Several processes under `torchrun`: every rank trains, but only rank 0 writes to the run folder and prints."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import torch
import torch.distributed as dist


@contextmanager
def join_process_group() -> Iterator[None]:
    """Join the process group if `torchrun` started this process; only rank 0 prints."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield
        return
    rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if rank < gpus:
        torch.cuda.set_device(rank)
    # Each tensor goes by its own device: a run on the CPU uses gloo also where there are GPUs.
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    try:
        with _silence_other_ranks():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def rank_folder(path: Path) -> Iterator[Path]:
    """The folder itself for rank 0; a throw-away copy (or a path, if there is none yet) for the others."""
    if not dist.is_initialized():
        yield path
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = path if dist.get_rank() == 0 else Path(scratch) / path.name
        if folder != path and path.is_dir():
            shutil.copytree(path, folder)
        # No rank writes before all have read.
        dist.barrier()
        yield folder


def is_distributed() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized()


def is_first_rank() -> bool:
    """Whether this process is rank 0, or the only one."""
    return not is_distributed() or dist.get_rank() == 0


def maximum_over_ranks(value: int) -> int:
    """The largest of the ranks' values; the value itself where there is one process."""
    if not is_distributed():
        return value
    values = torch.tensor(int(value))
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return int(values)


@contextmanager
def _silence_other_ranks() -> Iterator[None]:
    if dist.get_rank() == 0:
        yield
        return
    with Path(os.devnull).open("w") as null, redirect_stdout(null), redirect_stderr(null):
        yield
    sys.stdout.flush()
