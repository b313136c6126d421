"""What a site keeps between messages: its client state after each visit, and the anchor of the current stage.

Every message is handled by a new process, so whatever the next message needs is stored.

Client states are stored by round. The server names the visit whose upload it last accepted, so a visit that was too
late, was refused, or is repeated after a crash leaves no trace: the next one starts from the state of the named visit.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np

from fedauc.federation.serialization import Payload, pack_payload, rebuild_tree, unpack_tensors
from fedauc.files import make_folder, write_atomically
from fedauc.trees import Tree

MAGIC = b"fedauc-site-1 "

SUFFIX = ".payload"


class MissingSiteState(Exception):
    """A site has no 'plan', 'anchor' or 'client state' any more, so the server must send it or start afresh."""


class SiteRefusal(Exception):
    """A site does not do what it was asked. The text goes to the server, so it must not contain data.

    `rule` is the one that the refusal follows from, such as `hours.open`, for the audit log; empty if it has no name.
    `opens_in` is the number of seconds until the site answers again, where it is closed.
    """

    def __init__(self, reason: str, rule: str = "", opens_in: float | None = None) -> None:
        super().__init__(reason)
        self.rule, self.opens_in = rule, opens_in


class SiteState(Protocol):
    """Payloads by name: a small key-value store."""

    def list_names(self) -> list[str]:
        """The names of all stored payloads."""

    def load_payload(self, name: str) -> Payload | None:
        """The payload of that name, or None."""

    def save_payload(self, name: str, payload: Payload) -> None:
        """Store a payload, replacing one of the same name."""

    def delete_payload(self, name: str) -> None:
        """Delete a payload, if it exists."""


class FolderSiteState:
    """Site state in a folder on the site's disk: it survives processes, restarts and runs of the message service."""

    def __init__(self, folder: Path) -> None:
        make_folder(folder, 0o700)
        self._folder = folder

    def list_names(self) -> list[str]:
        """The names of all stored payloads."""
        return sorted(path.stem for path in self._folder.glob(f"*{SUFFIX}"))

    def load_payload(self, name: str) -> Payload | None:
        """The payload of that name, or None; a damaged file raises a ValueError."""
        path = self._folder / f"{name}{SUFFIX}"
        if not path.is_file():
            return None
        checksum_line, _, content = path.read_bytes().partition(b"\n")
        if checksum_line != _checksum_line(content):
            raise ValueError(f"{path} is damaged: its {len(content)} bytes do not match its checksum; delete it")
        header, _, body = content.partition(b"\n")
        return Payload(header.decode(), np.frombuffer(body, np.uint8))

    def save_payload(self, name: str, payload: Payload) -> None:
        """Store a payload, completely or not at all."""
        # Our JSON contains no line break, so the first one ends the header.
        content = payload.header_text.encode() + b"\n" + payload.body_bytes()
        # Keys and client states are for the site's owner alone.
        path = self._folder / f"{name}{SUFFIX}"
        write_atomically(path, _checksum_line(content) + b"\n" + content, is_private=True)

    def delete_payload(self, name: str) -> None:
        """Delete a payload, if it exists."""
        (self._folder / f"{name}{SUFFIX}").unlink(missing_ok=True)


def save_client_state(store: SiteState, round: int, client_state: Tree, last_accepted_round: int) -> None:
    """Store the state after a visit. Two versions stay: the one the server knows, and the one it may accept next.

    Those of later rounds stay as well: then this visit is that of a message which was delivered again, or very late.
    """
    store.save_payload(f"client-state-{round}", pack_payload({}, {"client_state": client_state}))
    _delete_earlier(store, "client-state-", {last_accepted_round}, round)


def load_client_state(store: SiteState, round: int, template: Tree) -> Tree:
    """The state after the visit of a round; `()` before the first visit, which is round -1."""
    if round < 0:
        return ()
    stored = store.load_payload(f"client-state-{round}")
    if stored is None:
        raise MissingSiteState("client state")
    tensors = unpack_tensors(stored)["client_state"]
    return rebuild_tree(tensors, template, "client_state") if tensors else ()


def save_anchor(store: SiteState, stage: int, anchor: Tree) -> None:
    """Store the anchor of a stage; those of earlier stages are deleted."""
    _delete_earlier(store, "anchor-", set(), stage)
    store.save_payload(f"anchor-{stage}", pack_payload({}, {"anchor": anchor}))


def load_anchor(store: SiteState, stage: int, template: Tree) -> Tree:
    """The stored anchor of a stage."""
    stored = store.load_payload(f"anchor-{stage}")
    if stored is None:
        raise MissingSiteState("anchor")
    return rebuild_tree(unpack_tensors(stored)["anchor"], template, "anchor")


def _delete_earlier(store: SiteState, prefix: str, needed: set[int], number: int) -> None:
    """Delete all payloads with this prefix and a smaller number, except those that are needed."""
    for name in store.list_names():
        text = name.removeprefix(prefix)
        if text != name and int(text) < number and int(text) not in needed:
            store.delete_payload(name)


def _checksum_line(content: bytes) -> bytes:
    return MAGIC + hashlib.sha256(content).hexdigest().encode()
