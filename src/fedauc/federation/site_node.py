"""A site's own process: it connects to the SuperLink, asks for messages often, and lets a resident worker answer them.

It takes the place of Flower's SuperNode program, which starts a new Python process per message and asks for messages
every three seconds. Connection, TLS, keys, heartbeats and messages are Flower's own; what this file replaces is the
loop around them. It does not import torch, so that it stays small and responsive while the worker computes.
"""

from __future__ import annotations

import argparse
import functools
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from click import ClickException
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Error, Message
from flwr.common.config import get_fused_config_from_fab, parse_config_args
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    pull_objects,
    push_object_contents_from_iterable,
)
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

from fedauc.federation.health import Pulse
from fedauc.federation.large_messages import prepare_for_large_messages
from fedauc.federation.site_settings import check_setting_names
from fedauc.federation.site_worker import LOG, Frame, RequestExpired, SiteWorker, WorkerFailure, log_to_stderr

WORKER_FACTORY = "fedauc.federation.site_app:make_handler"

FASTEST_POLL, SLOWEST_POLL = 0.05, 3.0
"""Seconds between two questions for messages: after a message, and when none has come for a long time."""

IDLE_SHARE = 0.05
"""The pause before the next question, as a share of the time since the last message: a wait grows by 5 % at most."""

REQUEST_SHARE = 4.0
"""The pause before the next question, in durations of the last one: a busy SuperLink is asked less often."""

OBJECT_BACKOFF = 0.05
"""Seconds before a part of a message that the server is still sending is asked for again."""


class SuperLinkConnection(NamedTuple):
    """What Flower's connection of a node offers."""

    node_id: int
    receive: Callable[[], tuple[Message, ObjectTree] | None]
    send: Callable[[Message, ObjectTree, float], tuple[set[str], str]]
    get_run: Callable[[int], Run]
    get_fab: Callable[[str, int], Any]
    pull_object: Callable[[int, str], bytes]
    push_object: Callable[[int, str, str, bytes], None]
    confirm_message_received: Callable[[int, str], None]


class AppOfRun(NamedTuple):
    """The request that loads a run's app, and the run's configuration."""

    load_request: Frame
    run_config: Mapping[str, Any]


class SiteNode:
    """Answers the messages of a connection, one at a time."""

    def __init__(self, link: SuperLinkConnection, worker: SiteWorker, node_config: Mapping[str, Any]) -> None:
        self._link, self._worker, self._node_config = link, worker, dict(node_config)
        self._pulse = Pulse(Path(str(node_config["state"])))
        self._apps: dict[int, AppOfRun] = {}
        self._loaded_app = ""

    def serve_messages(self) -> NoReturn:
        """Answer messages until the process is stopped."""
        last_message = time.monotonic()
        while True:
            asked = time.monotonic()
            if self.answer_next_message():
                last_message = time.monotonic()
            else:
                now = time.monotonic()
                time.sleep(choose_poll_interval(now - last_message, now - asked))

    def answer_next_message(self) -> bool:
        """Answer a message, if there is one; says whether there was."""
        try:
            received = self._link.receive()
            if received is None:
                self._pulse.wait()
                return False
            self._answer_message(*received)
        except RunNotRunningException:
            LOG.info("the run has ended; its message is ignored")
        except (ObjectPullError, ObjectPushError) as error:
            # As where the SuperLink was killed between the message and its parts; the server sends them again.
            LOG.warning("a message is dropped, because the SuperLink no longer has all of it: %s", error)
        return True

    def _answer_message(self, message: Message, tree: ObjectTree) -> None:
        metadata, started = message.metadata, time.monotonic()
        run_id, expires = metadata.run_id, max(metadata.created_at + metadata.ttl - time.time(), 1.0)
        self._pulse.answer(expires)
        app = self._apps.get(run_id) or self._fetch_app(run_id)
        names = list(dict.fromkeys(member.object_id for member in iterate_object_tree(tree)))
        pull = functools.partial(self._link.pull_object, run_id)
        contents = pull_objects(names, pull, initial_backoff=OBJECT_BACKOFF)
        self._link.confirm_message_received(run_id, metadata.message_id)
        size = sum(map(len, contents.values()))
        LOG.info("received message %s (%d bytes)", metadata.message_id[:8], size)
        header = {
            "kind": "answer",
            "run_id": run_id,
            "node_id": self._link.node_id,
            "message_id": metadata.message_id,
            "node_config": self._node_config,
            "run_config": dict(app.run_config),
            "objects": list(contents),
        }
        try:
            expires = max(metadata.created_at + metadata.ttl - time.time(), 1.0)
            answer = self._ask_worker(app, Frame(header, tuple(contents.values())), expires)
        except RequestExpired as expired:
            LOG.warning("message %s is not answered: %s", metadata.message_id[:8], expired)
            return
        except WorkerFailure as failure:
            LOG.error("message %s: %s", metadata.message_id[:8], failure)
            self._send_reply(*_describe_failure(message, str(failure)), 0.0)
            return
        del contents
        envelope, reply_tree, *objects = answer.blobs
        reply = message_from_proto(ProtoMessage.FromString(bytes(envelope)))
        replied = dict(zip(answer.header["objects"], objects, strict=True))
        self._send_reply(reply, ObjectTree.FromString(bytes(reply_tree)), replied, time.monotonic() - started)
        LOG.info("answered message %s after %.2f s", metadata.message_id[:8], time.monotonic() - started)

    def _fetch_app(self, run_id: int) -> AppOfRun:
        run = self._link.get_run(run_id)
        fab = self._link.get_fab(run.fab_hash, run_id)
        names = {"fab_id": run.fab_id, "fab_version": run.fab_version, "fab_hash": fab.hash_str}
        config = get_fused_config_from_fab(fab.content, run)
        self._apps[run_id] = AppOfRun(Frame({"kind": "load", **names}, (fab.content,)), config)
        return self._apps[run_id]

    def _ask_worker(self, app: AppOfRun, request: Frame, seconds: float) -> Frame:
        """The worker's answer; a worker that has died or has loaded another app is replaced first."""
        app_hash = str(app.load_request.header["fab_hash"])
        if self._loaded_app not in ("", app_hash):
            self._worker.stop()
        if self._worker.pid is None:
            self._loaded_app = ""
            self._worker.start()
        if not self._loaded_app:
            self._worker.ask(app.load_request, seconds)
            self._loaded_app = app_hash
        return self._worker.ask(request, seconds)

    def _send_reply(
        self, reply: Message, tree: ObjectTree, contents: Mapping[str, bytes | bytearray], seconds: float
    ) -> None:
        names, session = self._link.send(reply, tree, seconds)
        push = functools.partial(self._link.push_object, reply.metadata.run_id, session)
        push_object_contents_from_iterable(((name, bytes(contents[name])) for name in contents if name in names), push)


def choose_poll_interval(idle_seconds: float, request_seconds: float) -> float:
    """Seconds to the next question, from the time since the last message and the duration of the last question.

    >>> [choose_poll_interval(*seconds) for seconds in ((0.5, 0.01), (0.5, 0.05), (10.0, 0.01), (3600.0, 0.01))]
    [0.05, 0.2, 0.5, 3.0]
    """
    return min(max(FASTEST_POLL, IDLE_SHARE * idle_seconds, REQUEST_SHARE * request_seconds), SLOWEST_POLL)


def _describe_failure(message: Message, reason: str) -> tuple[Message, ObjectTree, dict[str, bytes]]:
    """The reply that tells the server why there is no answer; it sends the message again, up to its limit."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = (
        *(message.metadata.run_id, message.metadata.dst_node_id, 0),
    )
    reply = Message(Error(ErrorCode.CLIENT_APP_CRASHED, reason), reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    objects = {name: value.deflate() for name, value in get_all_nested_objects(reply).items()}
    return reply, get_object_tree(reply), objects


def read_node_config(text: str) -> dict[str, Any]:
    """The site's settings; the state folder is needed, because the worker's own memory does not survive it."""
    example = 'data="rows.csv" state="state"'
    try:
        settings: dict[str, Any] = parse_config_args([text])
    except ClickException as error:
        raise ValueError(f"node-config is {text!r}; it must hold names and values, as in {example}") from error
    for name in ("data", "state"):
        if name not in settings:
            raise ValueError(f"node-config is {text!r}; it must hold {name}, as in {example}")
    check_setting_names(settings)
    if "policy" not in settings:
        LOG.warning("node-config names no policy file, so that this site takes part in every run that it is asked for")
    return settings


def read_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A site's private key, which never leaves this process."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{path} is no private key; make one with ssh-keygen -t ecdsa -b 384") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path} holds another kind of key; make one with ssh-keygen -t ecdsa -b 384")
    return key


def main() -> None:
    """Connect a site and serve it until it is stopped; ends with exit code 1 when the connection is lost for good."""
    parser = argparse.ArgumentParser(description="A site of a federation; started by `fedauc federation site`.")
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT")
    parser.add_argument("--root-certificates", required=True)
    parser.add_argument("--key", type=Path, required=True)
    parser.add_argument("--node-config", required=True)
    options = parser.parse_args()
    log_to_stderr()
    prepare_for_large_messages()
    try:
        node_config, key = read_node_config(options.node_config), read_private_key(options.key)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    # Leaving the block tells the SuperLink that the site has gone, so that it may return at once.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    worker = SiteWorker(WORKER_FACTORY, Path(str(node_config["state"])))
    worker.start()
    try:
        connection = http_request_response(options.superlink, False, options.root_certificates, (key, key.public_key()))
        with connection as link:
            LOG.info("connected to %s as node %d", options.superlink, link[0])
            SiteNode(SuperLinkConnection(*link), worker, node_config).serve_messages()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        worker.stop()
    # Flower's connection logs an error and swallows it.
    sys.exit("error: the connection to the SuperLink was lost; see the lines above, and start the site again")


if __name__ == "__main__":
    main()
