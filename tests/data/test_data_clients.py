"""Clients: the index, the constructors, and what a million clients cost."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedauc.data.clients import Clients, examples

# Three clients: "a" holds rows 1 (+), 4 (-); "b" rows 0 (-), 3 (+), 5 (+); "c" row 2 (-).
INPUTS = np.arange(12, dtype=np.float64).reshape(6, 2)
LABELS = np.array([0, 1, 0, 1, 0, 1])
CLIENT = np.array(["b", "a", "c", "b", "a", "b"])


def list_rows_by_client(labels: np.ndarray, client: np.ndarray) -> dict[str, tuple[list[int], list[int]]]:
    """Each client's positive and negative rows, one row at a time."""
    held: dict[str, tuple[list[int], list[int]]] = {name: ([], []) for name in sorted(set(client.tolist()))}
    for row, (label, name) in enumerate(zip(labels, client.tolist(), strict=True)):
        held[name][0 if label == 1 else 1].append(row)
    return held


def assert_same_index(clients: Clients, labels: np.ndarray, client: np.ndarray) -> None:
    expected = list_rows_by_client(labels, client)
    assert clients.names.tolist() == list(expected)
    for number, (positives, negatives) in enumerate(expected.values()):
        assert clients.positives(number).tolist() == positives
        assert clients.negatives(number).tolist() == negatives
        assert clients.census.positives[number] == len(positives)
        assert clients.census.negatives[number] == len(negatives)
    assert clients.roster.sizes.tolist() == [len(p) + len(n) for p, n in expected.values()]


def test_index_lists_positives_then_negatives_of_each_client() -> None:
    clients = Clients.from_arrays(INPUTS, LABELS, CLIENT)
    assert_same_index(clients, LABELS, CLIENT)
    assert clients.rows.tolist() == [1, 4, 3, 5, 0, 2]
    assert clients.offsets.tolist() == [0, 2, 5, 6]
    assert (clients.rows.dtype, clients.offsets.dtype) == (np.dtype(np.int32), np.dtype(np.int64))
    assert repr(clients) == "Clients(3 clients, 6 rows, 3 positives)"


def test_index_matches_a_plain_loop_on_random_rows() -> None:
    draw = np.random.default_rng(0)
    labels, client = draw.integers(0, 2, 500), draw.integers(0, 60, 500)
    assert_same_index(Clients.from_arrays(np.zeros((500, 1)), labels, client), labels, client)


def test_row_lists_are_views() -> None:
    clients = Clients.from_arrays(INPUTS, LABELS, CLIENT)
    assert np.shares_memory(clients.positives(1), clients.rows)
    assert np.shares_memory(clients.negatives(1), clients.rows)


@pytest.mark.parametrize("convert", [np.asarray, torch.as_tensor, lambda values: values.tolist()])
def test_arrays_tensors_and_lists_give_the_same_clients(convert: Any) -> None:
    numbers = np.array([1, 0, 2, 1, 0, 1])
    clients = Clients.from_arrays(convert(INPUTS), convert(LABELS), convert(numbers))
    assert torch.equal(clients.inputs, torch.from_numpy(INPUTS))
    assert_same_index(clients, LABELS, numbers)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (np.float64, torch.float64),
        (np.float32, torch.float32),
        (np.float16, torch.float16),
        (np.uint8, torch.uint8),
        (np.int64, torch.int64),
        (np.int32, torch.int32),
        (np.int16, torch.float32),
        (np.bool_, torch.float32),
        (">f4", torch.float32),
    ],
)
def test_floats_and_bytes_keep_their_type(dtype: Any, expected: torch.dtype) -> None:
    inputs = np.array([[1], [0]]).astype(dtype)
    for values in (inputs, inputs[::-1][::-1], torch.as_tensor(inputs.astype(inputs.dtype.newbyteorder("=")))):
        clients = Clients.from_arrays(values, [0, 1], [7, 7])
        assert clients.inputs.dtype == expected
        assert clients.inputs.tolist() == [[1], [0]]
        assert clients.labels.dtype == (expected if expected.is_floating_point else torch.float32)


def test_read_only_memory_is_copied() -> None:
    inputs = INPUTS.copy()
    inputs.flags.writeable = False
    clients = Clients.from_arrays(inputs, LABELS, CLIENT)
    clients.inputs[0, 0] = 99.0
    assert inputs[0, 0] == 0.0


def test_to_moves_floats_and_leaves_bytes() -> None:
    floats = Clients.from_arrays(INPUTS, LABELS, CLIENT).to(torch.float32, "cpu")
    images = Clients.from_arrays(INPUTS.astype(np.uint8), LABELS, CLIENT).to(torch.float64)
    assert (floats.inputs.dtype, floats.labels.dtype) == (torch.float32, torch.float32)
    assert (images.inputs.dtype, images.labels.dtype) == (torch.uint8, torch.float64)
    assert examples(INPUTS, LABELS).to(torch.float16).labels.dtype == torch.float16


def test_groups_come_from_the_clients_rows() -> None:
    group = np.where(CLIENT == "b", "east", "west")
    clients = Clients.from_arrays(INPUTS, LABELS, CLIENT, group)
    assert clients.groups is not None
    assert clients.groups.tolist() == ["west", "east", "west"]
    assert clients.roster.groups is clients.groups


def test_assignment_may_leave_clients_empty() -> None:
    clients = Clients.from_assignment(INPUTS, LABELS, [3, 1, 1, 3, 1, 3], ["p", "q", "r", "s"], [0, 0, 1, 1])
    assert clients.roster.sizes.tolist() == [0, 3, 0, 3]
    assert len(clients.positives(0)) == len(clients.negatives(2)) == 0
    assert clients.positives(3).tolist() == [3, 5]


class Counted(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Counts how often each item is read."""

    def __init__(self) -> None:
        self.reads = [0] * len(LABELS)

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        self.reads[row] += 1
        return torch.as_tensor(INPUTS[row]), int(LABELS[row])


def test_dataset_is_read_once() -> None:
    dataset = Counted()
    clients = Clients.from_dataset(dataset, CLIENT)
    assert dataset.reads == [1] * 6
    assert torch.equal(clients.inputs, torch.from_numpy(INPUTS))
    assert_same_index(clients, LABELS, CLIENT)


def test_tensor_dataset_has_tensor_labels() -> None:
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(LABELS))
    assert_same_index(Clients.from_dataset(dataset, CLIENT), LABELS, CLIENT)


def make_frame() -> pd.DataFrame:
    columns = {"one": INPUTS[:, 0], "bank": CLIENT, "two": INPUTS[:, 1].astype(int), "fraud": LABELS}
    return pd.DataFrame(columns | {"note": list("uvwxyz")})


def test_frame_takes_the_other_numeric_columns() -> None:
    clients = Clients.from_frame(make_frame(), label="fraud", client="bank")
    assert torch.equal(clients.inputs, torch.from_numpy(INPUTS))
    assert_same_index(clients, LABELS, CLIENT)


def test_frame_takes_the_named_columns_in_their_order() -> None:
    clients = Clients.from_frame(make_frame(), label="fraud", client="bank", features=["two"], group="bank")
    assert clients.inputs.tolist() == INPUTS[:, 1:].tolist()
    assert clients.inputs.dtype == torch.float32  # integers only
    assert clients.groups is not None
    assert clients.groups.tolist() == ["a", "b", "c"]


@pytest.mark.parametrize("dtype", ["category", "string", "object"])
def test_frame_reads_every_kind_of_name_and_nullable_number(dtype: str) -> None:
    odd = make_frame().assign(fraud=LABELS.astype(bool)).astype({"bank": dtype, "two": "Int64", "fraud": "boolean"})
    assert_same_index(Clients.from_frame(odd, label="fraud", client="bank"), LABELS, CLIENT)


def test_a_million_clients_are_arrays_and_nothing_else() -> None:
    # Two rows each; one Python object per client would show as a million allocated blocks.
    clients_count = 1_000_000
    client = np.repeat(np.arange(clients_count)[::-1], 2)
    labels, inputs = np.tile([0, 1], clients_count), np.zeros((2 * clients_count, 1), dtype=np.float32)
    blocks_at_start = sys.getallocatedblocks()
    clients = Clients.from_arrays(inputs, labels, client)
    assert sys.getallocatedblocks() - blocks_at_start < 10_000
    assert clients.positives(0).tolist() == [2 * clients_count - 1]
    arrays = (clients.rows, clients.offsets, clients.names, *clients.census)
    # Four bytes per row for `rows`; eight for each client's offset, name and two counts.
    assert sum(array.nbytes for array in arrays) == 4 * 2 * clients_count + 8 * (4 * clients_count + 1)
    assert clients.inputs.data_ptr() == inputs.ctypes.data
