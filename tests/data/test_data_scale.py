"""Large tables: inputs are shared and not copied, mapped files stay files, and checks go block by block."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedauc.data import clients as data_clients
from fedauc.data import names as data_names
from fedauc.data import standardization
from fedauc.data.checks import BLOCK, as_float32, as_inputs
from fedauc.data.clients import Clients
from fedauc.data.dataset import Rows, TableParts
from fedauc.data.io.memory import LARGE, sparse_zeros
from fedauc.data.names import enumerate_names

# Each value is its own place, so that a wrong offset shows.
VALUES = np.arange(36, dtype=np.float32).reshape(12, 3)
LABELS = np.arange(12) % 2
CLIENT = np.arange(12) // 4


def save_array(folder: Path, values: np.ndarray = VALUES) -> Path:
    path = folder / "inputs.npy"
    np.save(path, values)
    return path


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.uint8])
def test_arrays_in_memory_are_shared(dtype: Any) -> None:
    inputs = VALUES.astype(dtype)
    for values in (inputs, torch.from_numpy(inputs), inputs[2:]):
        clients = Clients.from_arrays(values, LABELS[: len(values)], CLIENT[: len(values)])
        assert np.shares_memory(clients.inputs.numpy(), inputs)


@pytest.mark.parametrize("mode", ["r", "c", "r+"])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_a_mapped_file_is_not_copied(tmp_path: Path, mode: Any, dtype: Any) -> None:
    path = save_array(tmp_path, VALUES.astype(dtype))
    clients = Clients.from_arrays(np.load(path, mmap_mode=mode), LABELS, CLIENT)
    assert clients.inputs.numpy().tolist() == VALUES.tolist()
    # A copy would not see what is written to the file afterwards.
    np.load(path, mmap_mode="r+")[5, 1] = 99
    assert clients.inputs[5, 1] == 99


@pytest.mark.parametrize("rows", [slice(0, 12), slice(3, 12), slice(5, 9), slice(None, None, 2), slice(None, None, -1)])
@pytest.mark.parametrize("plain", [True, False])
def test_views_of_a_mapped_file_show_their_own_rows(tmp_path: Path, rows: slice, plain: bool) -> None:
    path = save_array(tmp_path)
    view = np.load(path, mmap_mode="r")[rows]
    inputs = as_inputs(np.asarray(view) if plain else view)
    assert np.array_equal(inputs.numpy(), VALUES[rows])
    np.load(path, mmap_mode="r+")[:] = -1
    # Rows that are not contiguous are copied; contiguous rows still share the memory of the file.
    assert bool((inputs == -1).all()) == view.flags.c_contiguous


def test_writing_to_mapped_inputs_never_reaches_the_file(tmp_path: Path) -> None:
    path = save_array(tmp_path)
    Clients.from_arrays(np.load(path, mmap_mode="r"), LABELS, CLIENT).inputs.fill_(7.0)
    assert np.array_equal(np.load(path), VALUES)


def test_columns_first_files_and_lost_files_are_copied(tmp_path: Path) -> None:
    path = save_array(tmp_path, np.asfortranarray(VALUES))
    assert np.array_equal(as_inputs(np.load(path, mmap_mode="r")).numpy(), VALUES)
    path = save_array(tmp_path)
    mapped = np.load(path, mmap_mode="r")
    path.rename(tmp_path / "elsewhere.npy")
    assert np.array_equal(as_inputs(mapped).numpy(), VALUES)
    # Another file has its name now, too short to be it.
    path.write_bytes(b"short")
    assert np.array_equal(as_inputs(mapped).numpy(), VALUES)


@pytest.mark.parametrize(
    ("shape", "holes"),
    [
        # Two blocks: a hole in the second, holes in both. Then one block and five rows: a hole in the very last.
        ((BLOCK, 2), [(BLOCK // 2 + 3, 1)]),
        ((BLOCK, 2), [(7, 0), (7, 1), (BLOCK - 1, 0)]),
        ((BLOCK + 5, 1), [(BLOCK + 4, 0)]),
        # A row larger than a block is a block.
        ((3, 2, BLOCK), [(1, 1, 9), (2, 0, 0)]),
    ],
)
def test_the_first_hole_is_found_in_any_block_and_all_are_counted(shape: Any, holes: list[Any]) -> None:
    inputs = np.zeros(shape, dtype=np.float32)
    inputs[tuple(np.transpose(holes))] = np.inf
    row, *index = holes[0]
    column = index[0] if len(index) == 1 else tuple(index)
    where = f"the first inf at row {row} (counted from 0), column {column}"
    message = f"inputs holds {len(holes)} values that are not finite, {where}"
    for values in (inputs, torch.from_numpy(inputs)):
        with pytest.raises(ValueError, match=re.escape(message)):
            as_inputs(values)
    message = f"inputs holds {len(holes)} values beyond float32, {where}"
    with pytest.raises(ValueError, match=re.escape(message)):
        as_float32(inputs)


@pytest.mark.parametrize(
    "names",
    [
        np.array([5, 3, 3, 9, 5]),
        np.array([-128, 127, 0, -128] * 100, dtype=np.int8),
        np.array([0, 2**64 - 1, 0], dtype=np.uint64),
        np.array([2**64 - 1, 2**64 - 2], dtype=np.uint64),
        np.array([-(2**63), 2**63 - 1, 0]),
        np.array([10**12, 10**12 + 1, 10**12]),
        np.array(["b", "a", "b"]),
    ],
)
@pytest.mark.parametrize("block", [2, 1 << 18])
def test_names_are_numbered_in_sorted_order(names: np.ndarray, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_names, "BLOCK", block)
    distinct, index = enumerate_names(names)
    expected = sorted(set(names.tolist()))
    assert distinct.tolist() == expected
    assert distinct.dtype == names.dtype
    assert index.tolist() == [expected.index(name) for name in names.tolist()]
    # Half of what an index takes in int64, and there is one per row.
    assert index.dtype == np.int32


# The largest sort key is twice the clients less one: the last in one byte, first and last in two, the first in four.
@pytest.mark.parametrize("count", [128, 129, 32_768, 32_769])
@pytest.mark.parametrize("block", [1_000, 1 << 18])
def test_rows_are_listed_by_client_then_class_then_place(
    count: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_clients, "BLOCK", block)
    draw = np.random.default_rng(0)
    index, labels = np.append(draw.integers(0, count, 100_000), count - 1), np.append(draw.integers(0, 2, 100_000), 0)
    clients = Clients.from_assignment(np.zeros((100_001, 1)), labels, index, np.arange(count))
    assert np.array_equal(clients.rows, np.lexsort((np.arange(100_001), 1 - labels, index)))


@pytest.mark.parametrize("block", [1, 7, 64, 10_000])
def test_standardizing_does_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(standardization, "BLOCK", block)
    inputs = np.random.default_rng(0).normal(1000.0, 3.0, (101, 3)).astype(np.float32)
    inputs[:, 2] = 0.1
    rows = Rows(inputs, np.arange(101) % 2)
    standardized = np.asarray(standardization.standardize_table(TableParts(rows, None, rows, "")).train.inputs)
    values = inputs.astype(np.float64)
    expected = (values - values.mean(axis=0)) / np.array([*values.std(axis=0)[:2], 1.0])
    # Float32 has seven digits; results are of size one.
    np.testing.assert_allclose(standardized, expected, atol=1e-6)
    assert standardized.dtype == np.float32


@pytest.mark.parametrize("count", [5, LARGE + 3])
def test_zeros_can_be_written_to(count: int) -> None:
    zeros = sparse_zeros(count)
    assert np.array_equal(zeros, np.zeros(count))
    assert zeros.dtype == np.float32
    zeros[count - 1] = 1
    assert torch.from_numpy(zeros).sum() == 1


RARE = """
import numpy as np
from fedauc.data.io.memory import sparse_zeros

def held():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

before = held()
made = sparse_zeros(1 << 24)
made[:: 1 << 17] = 1
print(held() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory from /proc")
def test_rare_ones_among_zeros_take_a_page_each() -> None:
    done = subprocess.run([sys.executable, "-c", RARE], capture_output=True, text=True, check=True)
    # 128 ones, half a megabyte apart, in 64 MB: 128 pages of 4 KB, or 32 of 2 MB.
    assert int(done.stdout) < 4 << 20


PEAK = """
import sys, numpy as np
from fedauc.data.clients import Clients

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

inputs = np.ones((800_000, 60), dtype=np.float32)
labels, client = np.arange(800_000, dtype=np.int32) % 2, np.arange(800_000, dtype=np.int32) % 50
Clients.from_arrays(np.ones((1_000, 60), dtype=np.float32), labels[:1_000], client[:1_000])
before = peak()
clients = Clients.from_arrays(inputs, labels, client)
print((peak() - before) / inputs.nbytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
def test_clients_take_little_memory_beyond_their_inputs() -> None:
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    # Per row 240 bytes of inputs; 12 bytes of index and label stay, and some 20 more are used on the way.
    assert float(done.stdout) < 0.3
