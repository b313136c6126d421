"""The edge to Flower: its Grid, Message and Context in terms of ours. Nothing else of the library knows it.

Own main loop instead of a Strategy, which fixes one exchange a round and one record per message; push and pull instead
of `send_and_receive`, which sleeps three seconds between looks.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np

from fedauc.discovery import lookup
from fedauc.experiments.options import build_config, parse_value
from fedauc.federation.agreement import FederationAgreement, ServerPolicy, read_sites
from fedauc.federation.exchange import Exchange, Node, Reply
from fedauc.federation.serialization import Payload, pack_payload
from fedauc.federation.server import FederatedRun
from fedauc.federation.site import DEFAULT_POLICY, LOG, SHARING_LEVELS, ModelBuilder, Site, SitePolicy
from fedauc.federation.site_data import SiteData
from fedauc.federation.site_state import FolderSiteState, SiteState
from fedauc.locks import hold_lock

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict
    from flwr.serverapp import Grid as FlwrGrid

FACTS, BODY = "facts", "body"
"""The two records of a message: a text, and one array."""

PATIENCE = 60.0
"""Seconds in which a ServerApp gives up that has outlived its SuperLink: it must not write beside the next one."""

OURS = ("method", "out", "sites", "resume", "options")
"""Keys of the run configuration that are no field of the terms and no option of the command line."""


class FlowerGrid:
    """A Flower grid as ours."""

    def __init__(self, grid: FlwrGrid) -> None:
        self._grid = grid

    def online_nodes(self) -> list[Node]:
        """Every SuperNode that is online, with its registered name and key and when it was last activated."""
        return [
            Node(node.node_id, node.name, normalize_public_key(node.public_key), node.last_activated_at)
            for node in self._grid.get_nodes()
        ]

    def push_message(self, node: int, parcel: Payload, seconds: float) -> str:
        """Send a parcel; after so many seconds the SuperLink drops it and its reply."""
        from flwr.app import Message

        message = Message(payload_to_records(parcel), dst_node_id=node, message_type="train", ttl=seconds)
        found = list(self._grid.push_messages([message]))
        return str(found[0]) if found and found[0] else ""

    def pull_replies(self, messages: Sequence[str]) -> list[Reply]:
        """Replies by the message they answer: an error for a dead node comes from the SuperLink itself."""
        return [self._read_reply(message) for message in self._grid.pull_messages(list(messages))]

    def _read_reply(self, message: Message) -> Reply:
        asked = message.metadata.reply_to_message_id
        if message.has_error():
            return Reply(asked, None, f"Flower error {message.error.code}: {message.error.reason}")
        try:
            return Reply(asked, payload_from_records(message.content))
        except Exception as error:  # Records of a stranger may be anything.
            return Reply(asked, Payload(f'"{type(error).__name__}"', np.zeros(0, np.uint8)))


class ContextSiteState:
    """What Flower keeps for a node during a run. It is lost when the SuperNode or the run ends: better a folder."""

    def __init__(self, state: RecordDict, run: str) -> None:
        self._state, self._prefix = state, f"{run}/"

    def list_names(self) -> list[str]:
        """What is there."""
        return sorted(key.removeprefix(self._prefix) for key in self._state if key.startswith(self._prefix))

    def load_payload(self, name: str) -> Payload | None:
        """A parcel, if it is there."""
        if self._prefix + name not in self._state:
            return None
        record: Any = self._state[self._prefix + name]
        return Payload(record["text"], np.frombuffer(record["body"], np.uint8))

    def save_payload(self, name: str, parcel: Payload) -> None:
        """Put a parcel in."""
        from flwr.app import ConfigRecord

        self._state[self._prefix + name] = ConfigRecord({"text": parcel.header_text, "body": parcel.body.tobytes()})

    def delete_payload(self, name: str) -> None:
        """Throw a parcel away."""
        self._state.pop(self._prefix + name, None)


def payload_to_records(parcel: Payload) -> RecordDict:
    """A parcel as Flower records; numpy's own format without pickle."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    return RecordDict(
        {FACTS: ConfigRecord({"text": parcel.header_text}), BODY: ArrayRecord({"flat": Array(parcel.body)})}
    )


def payload_from_records(records: RecordDict) -> Payload:
    """The parcel in Flower records."""
    text: Any = records[FACTS]["text"]
    flat: Any = records[BODY]["flat"]
    if not isinstance(text, str):
        raise ValueError(f"facts is a {type(text).__name__}; it must be text")
    return Payload(text, flat.numpy())


def normalize_public_key(key: bytes | str) -> str:
    """A public key in one form, whether it comes as PEM from the SuperLink or as an OpenSSH line from the table."""
    from cryptography.hazmat.primitives import serialization

    data = key.encode() if isinstance(key, str) else key
    if not data.strip():
        return ""
    read = serialization.load_ssh_public_key if data.startswith(b"ecdsa-") else serialization.load_pem_public_key
    form = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return str(read(data).public_bytes(*form).decode().strip())


# ---------------------------------------------------------------------------------------------------- what apps call


def run_server(grid: FlwrGrid, context: Context, build: ModelBuilder | None = None) -> None:
    """The whole of a ServerApp: start the run that the run configuration describes, or go on with it."""
    _speak()
    config = dict(context.run_config)
    out = _absolute("out", config)
    federation = read_run_config(config, read_sites(_absolute("sites", config)))
    sites = tuple(dataclasses.replace(site, key=normalize_public_key(site.key)) for site in federation.sites)
    if config.get("resume"):
        federation = FederationAgreement.read_json(out / "federation.json")
    exchange = Exchange(FlowerGrid(grid), sites, federation.policy)
    if not config.get("resume"):
        FederatedRun.create(federation, exchange, out, build)
    # Held before the state is read, so that nobody writes between the two.
    busy = f"{out} is in use by another server (pid {{pid}}) since {PATIENCE:g} s; stop it, or wait until it has ended"
    with hold_lock(out / ".lock", busy, PATIENCE):
        FederatedRun.resume(exchange, out, build).go()


def answer_message(
    message: Message,
    context: Context,
    load: Callable[[Mapping[str, Any]], SiteData],
    build: ModelBuilder | None = None,
) -> Message:
    """The whole of a ClientApp: one order in, one answer out.

    The node's configuration says what its owner allows: `share` (nothing, histograms or scores), `share-auc`, and the
    folder `state` in which the site keeps its memory.
    """
    from flwr.app import Message

    _speak()
    try:
        reply = _site(context, load, build).answer_message(payload_from_records(message.content))
    except Exception as error:  # Whatever an order or the node's configuration holds: a site that raises stops serving.
        LOG.exception("the order could not be read")
        reply = pack_payload({"kind": "unable", "reason": f"{type(error).__name__}; the site's log says more"})
    return Message(payload_to_records(reply), reply_to=message)


def _site(context: Context, load: Callable[[Mapping[str, Any]], SiteData], build: ModelBuilder | None) -> Site:
    node = context.node_config

    def drawer(run: str) -> SiteState:
        if not run.isalnum():
            raise ValueError(f"run is {run!r}; it must be letters and digits, since it names a folder")
        return (
            FolderSiteState(Path(str(node["state"])) / run) if "state" in node else ContextSiteState(context.state, run)
        )

    share: Any = lookup(
        "share",
        str(node.get("share", DEFAULT_POLICY.shared_scores)),
        dict(zip(SHARING_LEVELS, SHARING_LEVELS, strict=True)),
    )
    return Site(
        lambda: load(node), drawer, SitePolicy(share, bool(node.get("share-auc", DEFAULT_POLICY.share_auc))), build
    )


def read_run_config(config: Mapping[str, Any], sites: tuple[Any, ...]) -> FederationAgreement:
    """What a flat run configuration describes: fields of the terms, and options as on the command line.

    `options` holds further `name=value` pairs, for options that the app's pyproject.toml does not list.
    """
    kinds = get_type_hints(ServerPolicy)
    names = {name.replace("_", "-"): name for name in kinds}
    agreed = {
        names[key]: parse_value(kinds[names[key]], str(value), key) for key, value in config.items() if key in names
    }
    texts = {key: str(value) for key, value in config.items() if key not in names and key not in OURS}
    for pair in str(config.get("options", "")).split():
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"options holds {pair!r}; it must be name=value pairs with spaces between them")
        texts[key] = value
    built = build_config(str(config["method"]), None, texts)
    return FederationAgreement(recipe=built.recipe, sites=sites, model=built.model, policy=ServerPolicy(**agreed))


def _absolute(name: str, config: Mapping[str, Any]) -> Path:
    path = Path(str(config.get(name, "")))
    if not path.is_absolute():
        raise ValueError(f"{name} is {str(path)!r}; it must be an absolute path on the server: set it in run-config")
    return path


def _speak() -> None:
    """Our log on standard error, where Flower picks it up."""
    logger = logging.getLogger("fedauc")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s fedauc: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
