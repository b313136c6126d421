"""The adapter to Flower, tested with Flower's own records. Run with `make test-federation`."""

from __future__ import annotations

import stat
import subprocess
import time
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedauc.federation import flower
from fedauc.federation.agreement import read_sites
from fedauc.federation.app_folder import create_app_folder
from fedauc.federation.local_federation import LocalFederation
from fedauc.federation.run_config import read_run_config
from fedauc.federation.serialization import Payload, pack_payload, unpack_tensors
from fedauc.federation.server import FederatedRun
from fedauc.federation.site import Site
from fedauc.federation.site_worker import Frame, WorkerFailure
from fedauc.models.mlp import MLP
from federation.memory_grid import make_agreement, make_exchange, make_grid

# The typer that Flower asks for uses names that click is about to drop.
pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore:'click.utils:DeprecationWarning")]


def make_flower_message() -> Any:
    """An empty message, as if this process were a task of run 1."""
    from flwr.app import Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    return Message(RecordDict(), dst_node_id=2, message_type="train")


def test_a_payload_survives_flowers_records() -> None:
    payload = pack_payload({"kind": "visit"}, {"mean": (torch.randn(7), torch.zeros(0))})
    restored = flower.payload_from_records(flower.payload_to_records(payload))
    assert restored.header_text == payload.header_text
    assert np.array_equal(restored.body, payload.body)
    assert list(flower.payload_to_records(payload)) == ["header"]


def test_a_large_body_travels_as_one_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "INLINE_BYTES", 8)
    payload = pack_payload({"kind": "visit"}, {"mean": torch.randn(7)})
    records = flower.payload_to_records(payload)
    assert len(records.array_records["body"]) == 1
    assert np.array_equal(flower.payload_from_records(records).body, payload.body)


class ListingClient:
    """A SuperLink that lists replies; the parts of some are never there."""

    def __init__(self, replies: Mapping[str, Any], incomplete: Collection[str]) -> None:
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

        self.replies, self.confirmed, self.asked = dict(replies), list[str](), list[list[str]]()
        self.trees = {name: get_object_tree(message) for name, message in replies.items()}
        self.contents = {
            part: value.deflate()
            for name, message in replies.items()
            if name not in incomplete
            for part, value in get_all_nested_objects(message).items()
        }

    def PullMessages(self, request: Any) -> Any:
        """List a reply once, as the SuperLink does."""
        self.asked.append(list(request.message_ids))
        names = [name for name in request.message_ids if name in self.replies]
        messages = [self.replies.pop(name) for name in names]
        envelopes = [
            SimpleNamespace(metadata=SimpleNamespace(message_id=message.object_id, reply_to_message_id=name))
            for name, message in zip(names, messages, strict=True)
        ]
        return SimpleNamespace(messages_list=envelopes, message_object_trees=[self.trees[name] for name in names])

    def PullObject(self, request: Any) -> Any:
        """A part, if it is there."""
        content = self.contents.get(request.object_id)
        return SimpleNamespace(object_found=True, object_available=content is not None, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:
        """Remember which messages the server has."""
        self.confirmed.append(request.message_object_id)


def test_a_reply_whose_parts_never_come_delays_no_other_reply() -> None:
    """Its site was killed while it sent the reply. Flower's own grid would wait for minutes, and with it the server."""
    from flwr.app import Message
    from flwr.proto.node_pb2 import Node

    replies = {}
    for name in ("complete", "incomplete"):
        reply = Message(flower.payload_to_records(pack_payload({"kind": name})), reply_to=make_flower_message())
        reply.metadata.__dict__["_reply_to_message_id"] = name
        reply.metadata.__dict__["_message_id"] = reply.object_id
        replies[name] = reply
    client = ListingClient(replies, ["incomplete"])
    grid: Any = SimpleNamespace(_runtime_client=client, node=Node(node_id=1), run=SimpleNamespace(run_id=1))
    pulled, flower_grid, end = list[Any](), flower.FlowerGrid(grid), time.monotonic() + 10
    while not pulled and time.monotonic() < end:
        began = time.monotonic()
        pulled = flower_grid.pull_replies(["incomplete", "complete"])
        assert time.monotonic() - began < 1, "no call waits"
        time.sleep(0.01)
    assert [(reply.message_id, reply.payload.read_header()["kind"]) for reply in pulled] == [("complete", "complete")]
    assert len(client.confirmed) == 1
    # A reply that is being fetched is not asked for again.
    flower_grid.pull_replies(["incomplete", "later"])
    assert client.asked[-1] == ["later"]


@pytest.mark.parametrize("direction", ["message", "reply"])
def test_a_site_goes_on_where_the_superlink_has_lost_parts_of_a_message(
    direction: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The SuperLink was killed while the site fetched the message, or sent its reply."""
    from flwr.supercore.inflatable.inflatable_object import get_object_tree
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError

    from fedauc.federation import site_node

    message = make_flower_message()
    message.metadata.__dict__["_message_id"] = message.object_id
    waiting = [(message, get_object_tree(message))]

    def pull_object(run_id: int, name: str) -> bytes:
        if direction == "message":
            raise ObjectPullError(name, "the object could not be found.")
        return b"part"

    def push_object(run_id: int, session: str, name: str, content: bytes) -> None:
        raise ObjectPushError(name, run_id, session)

    def fail(*arguments: Any) -> Any:
        raise WorkerFailure("the worker has died")

    link = site_node.SuperLinkConnection(
        node_id=2,
        receive=lambda: waiting.pop() if waiting else None,
        send=lambda reply, tree, seconds: ({tree.object_id}, "session"),
        get_run=lambda run_id: pytest.fail("the app of the run is here"),
        get_fab=lambda digest, run_id: pytest.fail("the app of the run is here"),
        pull_object=pull_object,
        push_object=push_object,
        confirm_message_received=lambda run_id, name: None,
    )
    worker: Any = SimpleNamespace(pid=1, ask=fail)
    node = site_node.SiteNode(link, worker, {"state": str(tmp_path)})
    node._apps[message.metadata.run_id] = site_node.AppOfRun(Frame({"fab_hash": "app"}, ()), {})
    node._loaded_app = "app"
    assert node.answer_next_message()
    assert "a message is dropped, because the SuperLink no longer has all of it: Failed to pu" in caplog.text
    assert not node.answer_next_message(), "it asks for the next one"


@pytest.mark.parametrize("text", ['data="rows.csv"', 'state="state"', "data=rows.csv state=state"])
def test_a_site_needs_rows_and_a_state_folder(text: str) -> None:
    from fedauc.federation.site_node import read_node_config

    with pytest.raises(ValueError, match=r"node-config is .*; it must hold"):
        read_node_config(text)


def test_flowers_context_stores_payloads() -> None:
    from flwr.app import RecordDict

    state = RecordDict()
    store, other_run_store = flower.ContextSiteState(state, "one"), flower.ContextSiteState(state, "two")
    store.save_payload("client-state-3", pack_payload({}, {"client_state": torch.arange(4.0)}))
    assert store.list_names() == ["client-state-3"]
    assert other_run_store.list_names() == []
    restored = flower.ContextSiteState(state, "one").load_payload("client-state-3")
    assert restored is not None
    assert unpack_tensors(restored)["client_state"][0].tolist() == [0.0, 1.0, 2.0, 3.0]
    store.delete_payload("client-state-3")
    assert store.load_payload("client-state-3") is None


def test_quantized_answers_take_on_flowers_wire_what_the_ledger_counts(tmp_path: Path) -> None:
    """The bytes of all uploads, as Flower serializes its messages; headers and framing add less than 2 %."""
    from flwr.app import Message
    from flwr.common.serde import message_to_proto

    agreement = make_agreement("cycp-minimax", {"evaluation": "none"}, cycles=1, transforms=["clip", "quantize"])
    agreement = replace(agreement, model=MLP(hidden=(20_000,)))
    grid, sizes = make_grid(tmp_path / "sites"), list[int]()

    def weigh_answers(site: Site) -> None:
        answer_message = site.answer_message

        def answer(payload: Payload) -> Payload:
            reply = answer_message(payload)
            if reply.read_header()["kind"] == "visit":
                message = Message(flower.payload_to_records(reply), reply_to=make_flower_message())
                sizes.append(len(message_to_proto(message).SerializeToString()))
            return reply

        site.answer_message = answer  # type: ignore[method-assign]

    for site in grid.sites.values():
        weigh_answers(site)
    run = FederatedRun.create(agreement, make_exchange(grid, agreement), tmp_path / "run")
    result = run.train_to_end()
    counted = result["final"]["bytes_up"]
    plain = len(sizes) * (20_000 * (4 + 2) + 1 + 3) * 8
    assert counted < 0.13 * plain
    assert counted < sum(sizes) < 1.02 * counted


@pytest.mark.parametrize("node", [{}, {"share": "everything"}, {"state": "unwritable\0"}])
def test_a_site_answers_a_message_that_it_cannot_read(node: dict[str, Any]) -> None:
    """Records of another kind, an invalid policy, an impossible folder: the site always answers."""
    from flwr.app import Context, RecordDict

    context = Context(run_id=1, node_id=2, node_config=node, state=RecordDict(), run_config={})
    replied = flower.answer_message(make_flower_message(), context, lambda node: pytest.fail("no data is read for it"))
    assert flower.payload_from_records(replied.content).read_header()["kind"] == "refusal"


def test_records_of_an_unknown_kind_become_a_reply_that_is_refused() -> None:
    from flwr.app import ConfigRecord, Message, RecordDict

    asked = make_flower_message()
    for records in (RecordDict(), RecordDict({"facts": ConfigRecord({"text": 3})})):
        reply = flower.read_reply(Message(records, reply_to=asked))
        assert isinstance(reply.payload, Payload)
        with pytest.raises(ValueError, match="the header is a str"):
            reply.payload.read_header()


def test_an_app_has_all_it_needs_and_ships_no_secret(tmp_path: Path) -> None:
    """The bundle that Flower sends to sites holds the four Python files and no key, certificate or table."""
    folder = tmp_path / "app"
    create_app_folder(folder, {"north": "day", "south": "night"}, ["fed.example.org", "10.0.0.1"])
    sites = read_sites(folder / "sites.toml")
    assert [(site.name, site.group) for site in sites] == [("north", "day"), ("south", "night")]
    assert flower.normalize_public_key(sites[0].key) != flower.normalize_public_key(sites[1].key)
    assert flower.normalize_public_key(flower.normalize_public_key(sites[0].key)) == flower.normalize_public_key(
        sites[0].key
    )
    for secret in (folder / "keys" / "north", folder / "certificates" / "server.key"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    trial = LocalFederation(folder)
    shown = subprocess.run(
        ["ssh-keygen", "-l", "-f", str(folder / "keys" / "north.pub")], capture_output=True, text=True
    )
    assert shown.returncode == 0
    assert shown.stdout.startswith("384 ")
    trial.run_flwr("build", "--app", str(folder))
    (bundle,) = tmp_path.rglob("*.fab")
    names = zipfile.ZipFile(bundle).namelist()
    bundle.unlink()
    assert {name for name in names if name.endswith(".py")} == {
        *("fedauc_app/__init__.py", "fedauc_app/server_app.py", "fedauc_app/client_app.py", "fedauc_app/data.py")
    }
    assert not [name for name in names if "key" in name or "pem" in name or "sites" in name]
    with pytest.raises(ValueError, match="exists already"):
        create_app_folder(folder, {"north": "day"})


def test_a_run_configuration_becomes_an_agreement(tmp_path: Path) -> None:
    create_app_folder(tmp_path / "app", {"north": "day"})
    sites = read_sites(tmp_path / "app" / "sites.toml")
    config = {
        "method": "cycp-minimax",
        "cycles": 3,
        "seed": 5,
        "model": "mlp",
        "out": "/x",
        "sites": "/y",
        "resume": False,
        "deadline": 30.0,
        "quorum": 2,
        "evaluation": "none",
        "options": "model.hidden=8,4 algorithm.prox=0.5",
    }
    made = read_run_config(config, sites)
    assert (made.recipe.cycles, made.recipe.seed, made.recipe.algorithm.prox) == (3, 5, 0.5)  # type: ignore[attr-defined]
    assert made.model.hidden == (8, 4)  # type: ignore[attr-defined]
    assert (made.policy.deadline, made.policy.quorum, made.policy.evaluation) == (30.0, 2, "none")
    with pytest.raises(ValueError, match="options holds 'fast'; it must be name=value pairs"):
        read_run_config({**config, "options": "fast"}, sites)
    with pytest.raises(ValueError, match="cycels"):
        read_run_config({**config, "cycels": 3}, sites)
