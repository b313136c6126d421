"""A new key for a site: the SuperLink forgets the old one and registers the new one, and so does the site table.

A run that goes on knows the old key. So it is stopped before, and resumed after: it asks the site again for what it had
not answered, and ends with the same model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from fedauc.federation.agreement import read_sites
from fedauc.federation.exchange import Node
from fedauc.federation.flower import normalize_public_key
from fedauc.files import write_atomically

RunFlwr = Callable[..., str]
"""Runs `flwr` with these arguments, and returns what it prints."""

ENDED = "finished"
"""How the status of a run begins that has ended."""


def replace_site_key(app: Path, site: str, public_key: Path, superlink: str, run_flwr: RunFlwr) -> list[str]:
    """Replace a site's key at the SuperLink and in the site table; returns what was done.

    It can be repeated, as after a crash in the middle of it.
    """
    table = app / "sites.toml"
    entries = {entry.name: entry for entry in read_sites(table)}
    if site not in entries:
        raise ValueError(f"{table} has no site {site!r}; it has {', '.join(entries)}")
    line = _read_public_key(public_key)
    others = (entry for entry in entries.values() if entry.name != site)
    owner = next((entry.name for entry in others if _without_comment(entry.key) == line), "")
    if owner:
        raise ValueError(f"{public_key} is the key of site {owner!r}; every site needs a key of its own")
    runs = json.loads(run_flwr("list", superlink, "--format", "json"))["runs"]
    active = [str(run["run-id"]) for run in runs if not str(run["status"]).startswith(ENDED)]
    if active:
        reason = f"run {active[0]} goes on, and knows the old key"
        raise ValueError(f"{reason}: stop it with `flwr stop {active[0]} {superlink}`, and resume it afterwards")
    text = _replace_key(table.read_text(encoding="utf-8"), site, entries[site].key, line)
    nodes, done = [node for node in list_nodes(superlink) if node.name == site], []
    if normalize_public_key(line) not in {node.key for node in nodes}:
        run_flwr("supernode", "register", str(public_key), superlink, "--name", site)
        done.append(f"registered {public_key} as {site}")
    write_atomically(table, text.encode(), is_private=table.stat().st_mode & 0o077 == 0)
    done.append(f"{table} has the new key")
    for node in nodes:
        if node.key != normalize_public_key(line):
            run_flwr("supernode", "unregister", str(node.node_id), superlink)
            done.append(f"unregistered node {node.node_id}, which had the old key")
    return done


def list_nodes(superlink: str) -> list[Node]:
    """The nodes that are registered with a SuperLink; Flower's own command prints no names and no keys."""
    from flwr.cli.flower_config import read_superlink_connection
    from flwr.cli.utils import init_http_client_from_connection
    from flwr.proto.control_pb2 import ListNodesRequest

    client = init_http_client_from_connection(read_superlink_connection(superlink))
    try:
        listed = client.ListNodes(ListNodesRequest()).nodes_info
    finally:
        client.close()
    return [
        Node(node.node_id, node.name, normalize_public_key(node.public_key), node.last_activated_at)
        for node in listed
        if not node.unregistered_at
    ]


def _read_public_key(path: Path) -> str:
    """The line of a site's public key, without its comment."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        content = path.read_bytes()
        key = load_ssh_public_key(content)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{path} is no public key ({error}); give the file that ends in .pub") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError(f"{path} is another kind of key; make one with ssh-keygen -t ecdsa -b 384")
    return _without_comment(content.decode())


def _without_comment(line: str) -> str:
    """The kind and the content of a public key."""
    return " ".join(line.split()[:2])


def _replace_key(text: str, site: str, old: str, new: str) -> str:
    """The site table with another key in a site's section; everything else stays as its author has written it."""
    lines, section = text.splitlines(keepends=True), ""
    for number, line in enumerate(lines):
        stripped = line.strip()
        if stripped.startswith("["):
            section = stripped.strip("[]").strip().strip('"')
        if section == site and stripped.partition("=")[0].strip() == "key" and old in line:
            lines[number] = line.replace(old, new) if old else f'key = "{new}"\n'
            return "".join(lines)
    raise ValueError(f"the site table has no line `key = ...` in the section of {site!r}; add one")
