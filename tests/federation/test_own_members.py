"""A federation trains members that its server and sites have registered; a site without them refuses in a sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import fedauc
import own_members
from fedauc import plugins
from fedauc.federation.agreement import FederationAgreement
from fedauc.federation.serialization import Payload
from federation.memory_grid import create_run, make_agreement, make_grid, make_sites
from small_federations import held_out, small_federation


@pytest.fixture
def agreement() -> FederationAgreement:
    fedauc.register(own_members)
    return make_agreement("own-method", {"evaluation": "none"}, transforms=(own_members.OwnTransform(),))


@pytest.fixture
def visits(agreement: FederationAgreement, tmp_path: Path) -> list[Payload]:
    """Train, and return the messages that the sites were sent."""
    grid, messages = make_grid(tmp_path / "sites"), list[Payload]()
    push_message = grid.push_message

    def record_message(node_id: int, payload: Payload, seconds: float) -> str:
        messages.append(payload)
        return push_message(node_id, payload, seconds)

    grid.push_message = record_message  # type: ignore[method-assign]
    create_run(agreement, grid, tmp_path / "run").train_to_end()
    return [message for message in messages if message.read_header()["kind"] == "visit"]


def test_sites_that_have_the_members_train_them(visits: list[Payload], tmp_path: Path) -> None:
    assert json.loads((tmp_path / "run" / "result.json").read_text())["final"]["round"] == 3
    assert json.loads((tmp_path / "run" / "federation.json").read_text())["plugins"] == {"own_members": None}


def test_a_site_without_the_members_refuses_in_a_sentence(visits: list[Payload], tmp_path: Path) -> None:
    site = make_sites(small_federation(), tmp_path / "again", held_out())["site-0"]
    plugins.load_registrations({"classes": {}, "methods": {}, "packages": {}, "seen": {plugins.GROUP}})
    header = site.answer_message(visits[0]).read_header()
    assert header["kind"] == "refusal"
    assert header["reason"].startswith("unknown algorithm 'own-algorithm': ")
    assert header["reason"].endswith("; install the plug-in that has it at this site, or name it in FEDAUC_PLUGINS")
    # A site imports nothing because a server says so.
    assert "own-method" not in fedauc.algorithms.find_methods()


def test_a_resumed_server_imports_the_members(agreement: FederationAgreement, tmp_path: Path) -> None:
    path = tmp_path / "federation.json"
    path.write_text(agreement.to_json())
    plugins.load_registrations({"classes": {}, "methods": {}, "packages": {}, "seen": {plugins.GROUP}})
    assert FederationAgreement.read_json(path) == agreement
    path.write_text(agreement.to_json().replace('"own_members"', '"absent_members"'))
    plugins.load_registrations({"classes": {}, "methods": {}, "packages": {}, "seen": {plugins.GROUP}})
    with pytest.raises(
        ValueError, match=r"has an unknown .*, because there is no plug-in module 'absent_members' here"
    ):
        FederationAgreement.read_json(path)
    assert "absent_members" not in sys.modules
