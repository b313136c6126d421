"""A run's state in one file: trees of tensors with a checksum, written atomically, read without pickle's code.

The file is a line with the SHA-256 of the rest, then what `torch.save` makes of plain lists, numbers and tensors. A
named tuple is stored as its module, its name and its fields, and found again only among already imported modules.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import io
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedauc.ledger import Ledger, Traffic
from fedauc.training import State
from fedauc.trees import Tree

MAGIC = b"fedauc-checkpoint-1 "


class Checkpoint(NamedTuple):
    """The training state, every client's memory, the ledger, and the losses since the last record."""

    state: State
    client_states: dict[int, Tree]
    ledger: Ledger
    losses: list[float]


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, whatever happens and whoever writes it too."""
    _remove_stale_parts(path.parent.absolute())
    part = path.with_name(f".{path.name}.{platform.node()}-{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        # Nothing is left of it where all went well.
        part.unlink(missing_ok=True)


@functools.lru_cache(maxsize=1024)
def _remove_stale_parts(folder: Path) -> None:
    """Remove what killed processes of this machine left half-written in a folder; once, as folders may be large."""
    for part in folder.glob(f".*.{glob.escape(platform.node())}-*.part"):
        process = part.stem.rpartition("-")[2]
        if process.isdecimal() and not _is_process_alive(int(process)):
            with suppress(OSError):
                part.unlink()


def _is_process_alive(process: int) -> bool:
    # Signal 0 only asks; elsewhere than on POSIX it is a signal like others.
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint."""
    state, client_states, ledger, losses = checkpoint
    content = {
        "round": state.round,
        "server": _pack_tree(state.server),
        "average": _pack_tree(state.average),
        "memories": {client: _pack_tree(client_state) for client, client_state in client_states.items()},
        "traffic": list(ledger.traffic),
        "stage": ledger.stage,
        "anchored": sorted(ledger.anchored),
        "losses": losses,
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    payload = buffer.getvalue()
    write_atomically(path, MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)


def load_checkpoint(path: Path, device: str) -> Checkpoint:
    """Read a checkpoint, or say what is wrong with it."""
    header, _, payload = path.read_bytes().partition(b"\n")
    if header != MAGIC + hashlib.sha256(payload).hexdigest().encode():
        remedy = "delete it to resume from the one before it"
        raise ValueError(f"checkpoint {path} is damaged: its {len(payload)} bytes do not match its checksum; {remedy}")
    content: dict[str, Any] = torch.load(io.BytesIO(payload), map_location=device, weights_only=True)
    state = State(content["round"], _unpack_tree(content["server"]), _unpack_tree(content["average"]))
    client_states = {client: _unpack_tree(client_state) for client, client_state in content["memories"].items()}
    ledger = Ledger(Traffic(*content["traffic"]), content["stage"], set(content["anchored"]))
    return Checkpoint(state, client_states, ledger, content["losses"])


def _pack_tree(tree: Tree) -> Any:
    if isinstance(tree, Tensor):
        # A view would be stored with all of the tensor it is cut from.
        return tree.clone()
    kind = type(tree)
    name = [kind.__module__, kind.__qualname__] if hasattr(tree, "_fields") else []
    return [name, [_pack_tree(child) for child in tree]]


def _unpack_tree(packed: Any) -> Tree:
    if isinstance(packed, Tensor):
        return packed
    name, children = packed
    values = [_unpack_tree(child) for child in children]
    return _find_record_type(*name)(*values) if name else tuple(values)


def _find_record_type(module: str, name: str) -> Any:
    kind = getattr(sys.modules.get(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise ValueError(f"the checkpoint holds a {module}.{name}, which is unknown; import the module that defines it")
    return kind
