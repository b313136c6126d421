"""A site answers every message, keeps its state, and sends no more than its policy allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedauc.data.weighting import WEIGHTINGS, class_scales, row_scales
from fedauc.federation import visit_messages as orders
from fedauc.federation.serialization import Payload, pack_payload, unpack_tensors
from fedauc.federation.site import Site, SitePolicy
from fedauc.federation.site_data import SiteData
from fedauc.federation.site_state import (
    FolderSiteState,
    load_anchor,
    load_client_state,
    save_anchor,
    save_client_state,
)
from fedauc.federation.visit_messages import ClassTotals
from fedauc.interfaces import Census, Phase
from federation.memory_grid import create_run, make_agreement, make_grid, make_sites
from small_federations import held_out, small_federation

EMPTY = np.zeros(0, np.uint8)


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        "{}",
        '{"kind": "reboot"}',
        '{"kind": "visit"}',
        '{"kind": "evaluate", "requested": "everything"}',
        '{"kind": "visit", "recipe": {"name": "x"}, "phase": {}}',
        "[" * 100_000,
    ],
)
def test_a_site_answers_every_message(text: str, tmp_path: Path) -> None:
    site = make_sites(small_federation(), tmp_path, held_out())["site-0"]
    header = site.answer_message(Payload(text, EMPTY)).read_header()
    assert header["kind"] == "refusal"
    assert "\n" not in header["reason"]


def test_an_error_that_quotes_rows_does_not_leave_the_site(tmp_path: Path) -> None:
    def load() -> SiteData:
        raise ValueError("row 7 holds 'Jane Doe'")

    answer = Site(load, lambda run: FolderSiteState(tmp_path)).answer_message(pack_payload({"kind": "register"}))
    assert answer.read_header()["reason"] == "ValueError; see the site's log"
    assert "Jane" not in answer.header_text


def test_rows_that_are_not_finite_are_found_when_a_site_registers(tmp_path: Path) -> None:
    data = SiteData(torch.tensor([[1.0], [torch.nan]]), np.array([0, 1], np.int8))
    answer = Site(lambda: data, lambda run: FolderSiteState(tmp_path)).answer_message(
        pack_payload({"kind": "register"})
    )
    assert answer.read_header()["kind"] == "refusal"


def test_a_bad_site_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="share is 'rows'; use 'nothing', 'histograms', 'scores'"):
        make_sites(small_federation(), tmp_path, policy=SitePolicy("rows"))  # type: ignore[arg-type]


def test_a_repeated_visit_gives_the_same_bits_and_stores_one_client_state(tmp_path: Path) -> None:
    """A server that has crashed sends the same message twice, and then the next."""
    agreement = make_agreement("scaffold", {"evaluation": "none"}, participation="cyclic")
    grid = make_grid(tmp_path / "sites")
    sent_messages: list[Payload] = []
    push_message = grid.push_message

    def record_message(node_id: int, payload: Payload, seconds: float) -> str:
        sent_messages.append(payload)
        return push_message(node_id, payload, seconds)

    grid.push_message = record_message  # type: ignore[method-assign]
    create_run(agreement, grid, tmp_path / "run").train_to_end()
    headers = [message.read_header() for message in sent_messages]
    visits = [
        message
        for message, header in zip(sent_messages, headers, strict=True)
        if header["kind"] == "visit" and header["client"] == 0
    ]
    site = make_sites(small_federation(), tmp_path / "again")["site-0"]
    first, again = site.answer_message(visits[0]), site.answer_message(visits[0])
    assert first.header_text == again.header_text
    assert np.array_equal(first.body, again.body)
    second = site.answer_message(visits[1])
    repeated = site.answer_message(visits[1])
    assert np.array_equal(second.body, repeated.body)
    assert not np.array_equal(first.body, second.body)
    (run,) = (tmp_path / "again" / "site-0").iterdir()
    assert FolderSiteState(run).list_names() == ["client-state-0", "client-state-3"]


# ---------------------------------------------------------------------------------------------------- class totals


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_totals_weigh_a_site_as_the_true_census_does(weighting: str) -> None:
    """Eight sites, one empty, two without positives, one without negatives: all scales agree to the bit."""
    census = small_federation().census
    totals = ClassTotals.from_census(census)
    for client in range(len(census.positives)):
        counts = (int(census.positives[client]), int(census.negatives[client]))
        if sum(counts):
            rebuilt = totals.equivalent_census(client, counts)
            assert np.array_equal(class_scales(rebuilt, weighting)[client], class_scales(census, weighting)[client])
            assert row_scales(rebuilt, weighting)[client] == row_scales(census, weighting)[client]
            assert ClassTotals.from_census(rebuilt) == totals


def test_totals_of_one_class_each() -> None:
    """Every positive at one site, every negative at another."""
    census = Census(np.array([5, 0]), np.array([0, 9]))
    assert ClassTotals.from_census(census).equivalent_census(1, (0, 9)).positives.tolist() == [5, 0]


def test_a_phase_survives_json() -> None:
    phase = Phase(3, 1, 0, 0.1 / 3, 2, make_agreement("cycp-fedavg").recipe.batch, learning_cycles=2, ends_cycle=True)
    assert orders.phase_from_json(json.loads(json.dumps(orders.phase_to_json(phase)))) == phase


# ------------------------------------------------------------------------------------------------------ site state


def test_site_state_is_stored_completely(tmp_path: Path) -> None:
    store = FolderSiteState(tmp_path / "state")
    assert store.load_payload("client-state-1") is None
    payload = pack_payload({"word": "a\nb"}, {"client_state": torch.arange(3.0)})
    store.save_payload("client-state-1", payload)
    result = FolderSiteState(tmp_path / "state").load_payload("client-state-1")
    assert result is not None
    assert result.header_text == payload.header_text
    assert torch.equal(unpack_tensors(result)["client_state"][0], torch.arange(3.0))
    assert store.list_names() == ["client-state-1"]
    (file,) = (tmp_path / "state").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"is damaged: its \d+ bytes do not match its checksum; delete it"):
        store.load_payload("client-state-1")
    store.delete_payload("client-state-1")
    store.delete_payload("client-state-1")
    assert store.list_names() == []


def test_a_message_that_is_delivered_again_much_later_deletes_no_newer_state(tmp_path: Path) -> None:
    """The message of the first visit names no state before it, so that it is answered; the state of round 3 stays."""
    store, state = FolderSiteState(tmp_path), torch.arange(3.0)
    for round, last_accepted in ((0, -1), (3, 0), (0, -1)):
        save_client_state(store, round, state + round, last_accepted)
        save_anchor(store, round, state)
    assert torch.equal(load_client_state(store, 3, state), state + 3)
    assert torch.equal(load_anchor(store, 3, state), state)
    save_client_state(store, 6, state, 3)
    assert store.list_names() == ["anchor-0", "anchor-3", "client-state-3", "client-state-6"]


# ------------------------------------------------------------------------------------------------------------ data


def test_a_site_is_one_client_with_the_simulators_rows() -> None:
    clients = small_federation()
    for client in (0, 1, 3):
        messages = clients.rows[clients.offsets[client] : clients.offsets[client + 1]]
        data = SiteData.from_arrays(clients.inputs[messages], clients.labels[messages])
        alone = data.as_only_client(client, len(clients))
        for side in ("positives", "negatives"):
            ours, theirs = getattr(alone, side)(client), getattr(clients, side)(client)
            assert torch.equal(alone.inputs[ours], clients.inputs[theirs])


def test_a_folder_is_mapped_not_read(tmp_path: Path) -> None:
    rows, labels = np.arange(12, dtype=np.float32).reshape(6, 2), np.array([0, 1, 0, 1, 0, 0])
    for name, array in {"x": rows, "y": labels, "test_x": rows[:2], "test_y": labels[:2]}.items():
        np.save(tmp_path / f"{name}.npy", array)
    data = SiteData.from_folder(tmp_path)
    assert data.class_counts == (2, 4)
    assert data.test is not None
    assert data.test.labels.tolist() == [0.0, 1.0]
    data.inputs[0, 0] = 99.0
    assert np.load(tmp_path / "x.npy")[0, 0] == 0.0
    (tmp_path / "test_x.npy").unlink()
    (tmp_path / "test_y.npy").unlink()
    assert SiteData.from_folder(tmp_path).test is None
    with pytest.raises(ValueError, match=r"holds no x\.npy; write x\.npy and y\.npy"):
        SiteData.from_folder(tmp_path / "nothing")


def test_a_file_is_split_once_and_again_when_it_changes(tmp_path: Path) -> None:
    """Ten rows, three of them positive: a third of each class to the nearest row is two negatives and one positive."""
    file, cache = tmp_path / "rows.csv", tmp_path / "cache"
    lines = ["age,y", *(f"{age},{int(age < 3)}" for age in range(10))]
    file.write_text("\n".join(lines) + "\n")
    data = SiteData.from_file(file, cache, test_fraction=1 / 3)
    assert data.class_counts == (2, 5)
    assert data.test is not None
    assert data.test.labels.sum() == 1
    stamp = (cache / "x.npy").stat().st_mtime_ns
    SiteData.from_file(file, cache, test_fraction=1 / 3)
    assert (cache / "x.npy").stat().st_mtime_ns == stamp
    file.write_text("\n".join([*lines, "10,0"]) + "\n")
    assert SiteData.from_file(file, cache, test_fraction=1 / 3).class_counts == (
        2,
        5,
    )  # a third of eight negatives is three
    assert len(np.load(cache / "test_y.npy")) == 4
    with pytest.raises(ValueError, match="no such file: give the path of a file that exists"):
        SiteData.from_file(tmp_path / "none.csv", cache)


def test_a_site_may_hold_one_class(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("age,y\n" + "".join(f"{age},0\n" for age in range(10)))
    assert SiteData.from_file(file, tmp_path / "cache").class_counts == (0, 7)


def test_a_dataset_of_items() -> None:
    class Items(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
            return torch.full((2,), float(row)), row % 2

    data = SiteData.from_dataset(Items(), Items())
    assert data.class_counts == (2, 2)
    assert data.test is not None
    assert data.test.inputs.shape == (4, 2)
