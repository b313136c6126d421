"""Processes that handle large messages keep freed memory, and let Flower send larger parts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fedauc.federation.large_messages import PART_BYTES, PART_VARIABLE

COUNT_FAULTS = """
import os, resource, sys
import numpy as np
if sys.argv[1] == "prepared":
    from fedauc.federation.large_messages import prepare_for_large_messages
    prepare_for_large_messages()
def count():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(12_000_000, np.float32)
before = count()
for _ in range(5):
    np.ones(12_000_000, np.float32)
print(count() - before, os.environ.get("FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", ""))
"""
"""Five arrays of 48 MB, each freed before the next; the first one is not counted."""

PAGES = 48_000_000 // os.sysconf("SC_PAGE_SIZE")


def run_in_a_process(mode: str, variable: str = "") -> tuple[int, str]:
    environment = {**os.environ, **({PART_VARIABLE: variable} if variable else {})}
    done = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS, mode], capture_output=True, text=True, check=True, env=environment
    )
    faults, _, size = done.stdout.strip().partition(" ")
    return int(faults), size


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told to keep memory")
def test_large_arrays_use_freed_memory_again() -> None:
    """Pages of 2 MB, which some systems give to numpy's arrays, make fewer faults than pages; so 5 % is the bound."""
    faults, size = run_in_a_process("prepared")
    assert (faults < PAGES // 20, size) == (True, str(PART_BYTES))


def test_whoever_sets_the_size_of_parts_decides() -> None:
    assert run_in_a_process("prepared", "1000")[1] == "1000"
