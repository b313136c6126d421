"""Serialization: the receiver gets the same bits, and refuses tensors that do not fit."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fedauc.algorithms.minimax import Shared, starting_point
from fedauc.federation.serialization import (
    ALLOWED_DTYPES,
    Payload,
    pack_payload,
    rebuild_tree,
    tensor_layouts,
    unpack_tensors,
)
from fedauc.interfaces import Model
from fedauc.objectives.minimax import Minimax
from small_federations import same_bits


def test_trees_of_every_dtype_come_back_bit_by_bit() -> None:
    """Odd sizes, so that tensors are not aligned as their dtypes require; an empty tensor and a scalar."""
    tensors = [torch.arange(3).to(dtype) for dtype in ALLOWED_DTYPES.values()]
    tree = (tuple(tensors), torch.tensor(2.5), torch.zeros(0, 4), torch.arange(6.0).reshape(2, 3).T)
    payload = pack_payload({"kind": "test"}, {"one": tree, "two": ()})
    assert payload.body.dtype == np.uint8
    assert payload.body.ndim == 1
    restored = unpack_tensors(Payload(payload.header_text, payload.body.copy()))
    assert restored["two"] == []
    assert same_bits(rebuild_tree(restored["one"], tree, "tree"), tree)
    assert payload.read_header()["kind"] == "test"


def test_named_tuples_are_rebuilt_from_the_receivers_structure() -> None:
    point = starting_point(Model(torch.randn(5), torch.zeros(0)), Minimax())
    payload = pack_payload({}, {"shared": point})
    assert "minimax" not in payload.header_text
    assert "Shared" not in payload.header_text
    restored = rebuild_tree(unpack_tensors(payload)["shared"], point, "shared")
    assert isinstance(restored, Shared)
    assert same_bits(restored, point)


def test_nan_and_infinity_travel_as_they_are() -> None:
    """Serialization does not check values; the reader of an answer does."""
    tree = torch.tensor([torch.nan, torch.inf, -0.0])
    (restored,) = unpack_tensors(pack_payload({}, {"a": tree}))["a"]
    assert torch.equal(restored.view(torch.int32), tree.view(torch.int32))


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ([torch.zeros(3)], r"mean has tensors \[\['float32', 3\]\]; expected are \[\['float32', 2\]\]"),
        ([torch.zeros(2, dtype=torch.float64)], "float64"),
        ([], "mean has tensors "),
        ([torch.zeros(2), torch.zeros(2)], "mean has tensors "),
    ],
)
def test_tensors_that_do_not_fit_are_refused(leaves: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("'", '"')):
        rebuild_tree(leaves, torch.zeros(2), "mean")


def test_a_body_of_the_wrong_size_is_refused_before_it_is_copied() -> None:
    payload = pack_payload({}, {"a": torch.zeros(4)})
    with pytest.raises(ValueError, match="the body has 16 bytes; at most 8 are expected"):
        unpack_tensors(payload, max_bytes=8)
    with pytest.raises(ValueError, match="the body has 15 bytes; its layouts describe 16"):
        unpack_tensors(payload._replace(body=payload.body[:-1]))
    with pytest.raises(ValueError, match="one flat array of uint8"):
        unpack_tensors(payload._replace(body=np.zeros(4, np.float32)))


@pytest.mark.parametrize(
    "entry", [["object", 1], ["float32", -1], ["float32", 1.5], ["float32", True], [], "float32", [None], [[1], 2]]
)
def test_an_invalid_layout_is_refused(entry: object) -> None:
    body = np.zeros(4, np.uint8)
    with pytest.raises(ValueError, match="a layout"):
        unpack_tensors(Payload(json.dumps({"layouts": {"a": [entry]}}), body))


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"layouts": 3}', '{"layouts": {"a": 3}}', "{}"])
def test_an_invalid_header_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        unpack_tensors(Payload(text, np.zeros(0, np.uint8)))
    assert "\n" not in str(caught.value)


def test_an_overlong_header_is_not_parsed() -> None:
    with pytest.raises(ValueError, match="the header has 1048577 characters; at most 1048576 are accepted"):
        Payload(" " * ((1 << 20) + 1), np.zeros(0, np.uint8)).read_header()


def test_a_layout_lists_dtypes_and_shapes() -> None:
    assert tensor_layouts(Model(torch.zeros(7), torch.zeros(0))) == [["float32", 7], ["float32", 0]]


def test_the_bytes_of_a_packed_body_are_not_copied_again() -> None:
    payload = pack_payload({}, {"mean": (torch.arange(5.0), torch.zeros(0), torch.tensor(3, dtype=torch.int8))})
    base: object = payload.body.base
    assert payload.body_bytes() is base
    part = Payload(payload.header_text, payload.body[4:])
    assert part.body_bytes() == payload.body_bytes()[4:]
    assert pack_payload({}).body_bytes() == b""
