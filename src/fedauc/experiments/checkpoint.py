"""A run's state in one file: trees of tensors with a checksum, written atomically, read without pickle's code.

The file is a line with the SHA-256 of the rest, then what `torch.save` makes of plain lists, numbers and tensors. A
named tuple is stored as its module, its name and its fields, and found again only among already imported modules.
"""

from __future__ import annotations

import hashlib
import io
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedauc.files import write_atomically
from fedauc.ledger import Ledger, Traffic
from fedauc.training import State
from fedauc.trees import Tree, tree_map

MAGIC = b"fedauc-checkpoint-1 "


class Checkpoint(NamedTuple):
    """The training state, the clients' states, the ledger, and the losses since the last record.

    `callback_states` holds the states of callbacks that have one, and `stop_reason` why a callback has ended the run.
    """

    state: State
    client_states: dict[int, Tree]
    ledger: Ledger
    losses: list[float]
    callback_states: Mapping[str, Tree] = MappingProxyType({})
    stop_reason: str | None = None

    def copy_to_host(self) -> Checkpoint:
        """A copy in host memory that stays as it is while training goes on."""
        round, *trees = self.state
        ledger = Ledger()
        ledger.restore_from(self.ledger)
        return Checkpoint(
            State(round, *[tree_map(_copy_to_host, tree) for tree in trees]),
            {client: tree_map(_copy_to_host, client_state) for client, client_state in self.client_states.items()},
            ledger,
            list(self.losses),
            {name: tree_map(_copy_to_host, state) for name, state in self.callback_states.items()},
            self.stop_reason,
        )


class Checkpointer:
    """Says when a run is to be saved, and saves it from a copy in a background thread while training goes on.

    Checkpoints take at most `share` of the training time: the next one is due when that share of the seconds since the
    last one pays for it, but not before `interval` seconds. With `every_round`, each round is saved before the next
    one begins. The last round is saved too, unless `at_end` is false.
    """

    def __init__(
        self,
        write: Callable[[Checkpoint], None],
        share: float = 0.03,
        interval: float = 30.0,
        every_round: bool = False,
    ) -> None:
        self._write, self._share, self._interval = write, share, interval
        self.every_round, self.at_end = every_round, True
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[float] | None = None
        self._cost = 0.0

    def is_due(self, seconds: float) -> bool:
        """Whether to save now, so many seconds of training after the last checkpoint."""
        if self._writing is not None and self._writing.done():
            self.wait()
        return self.every_round or (
            self._writing is None and seconds >= self._interval and self._share * seconds >= self._cost
        )

    def save(self, checkpoint: Checkpoint) -> None:
        """Copy the checkpoint now and write the copy in the background, one write at a time."""
        self.wait()
        begin = time.perf_counter()
        copy = checkpoint.copy_to_host()
        self._writing = self._thread.submit(self._write_copy, copy, time.perf_counter() - begin)
        if self.every_round:
            self.wait()

    def wait(self) -> None:
        """Wait for the write that is under way; an error of the writer is raised here."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._cost = writing.result()

    def _write_copy(self, copy: Checkpoint, copying: float) -> float:
        """The seconds that the checkpoint has cost, including those of its copy."""
        begin = time.perf_counter()
        self._write(copy)
        return copying + time.perf_counter() - begin


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint file."""
    state, client_states, ledger, losses, callback_states, stop_reason = checkpoint
    content: dict[str, Any] = {
        "round": state.round,
        "server": _pack_tree(state.server),
        "average": _pack_tree(state.average),
        "optimizer": _pack_tree(state.optimizer),
        "transforms": _pack_tree(state.transforms),
        "memories": {client: _pack_tree(client_state) for client, client_state in client_states.items()},
        "traffic": list(ledger.traffic),
        "stage": ledger.stage,
        "anchored": sorted(ledger.anchored),
        "losses": losses,
    }
    if callback_states:
        content["callbacks"] = {name: _pack_tree(callback_state) for name, callback_state in callback_states.items()}
    if stop_reason is not None:
        content["stop_reason"] = stop_reason
    buffer = io.BytesIO()
    torch.save(content, buffer)
    payload = buffer.getbuffer()
    write_atomically(path, MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n", payload)


def load_checkpoint(path: Path, device: str) -> Checkpoint:
    """Read a checkpoint file onto a device; a damaged one is a `ValueError`."""
    header, _, payload = path.read_bytes().partition(b"\n")
    if header != MAGIC + hashlib.sha256(payload).hexdigest().encode():
        remedy = "delete it to resume from the one before it"
        raise ValueError(f"checkpoint {path} is damaged: its {len(payload)} bytes do not match its checksum; {remedy}")
    content: dict[str, Any] = torch.load(io.BytesIO(payload), map_location=device, weights_only=True)
    # Checkpoints of earlier versions have no entry for server optimizers and for the state of transforms.
    parts = ("server", "average", "optimizer", "transforms")
    state = State(content["round"], *(_unpack_tree(content.get(part, [[], []])) for part in parts))
    client_states = {client: _unpack_tree(client_state) for client, client_state in content["memories"].items()}
    ledger = Ledger(Traffic(*content["traffic"]), content["stage"], set(content["anchored"]))
    callback_states = {name: _unpack_tree(packed) for name, packed in content.get("callbacks", {}).items()}
    return Checkpoint(state, client_states, ledger, content["losses"], callback_states, content.get("stop_reason"))


def _copy_to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _pack_tree(tree: Tree) -> Any:
    if isinstance(tree, Tensor):
        # A view would be stored with the whole tensor that it belongs to.
        return tree if tree.untyped_storage().nbytes() == tree.nbytes else tree.clone()
    kind = type(tree)
    name = [kind.__module__, kind.__qualname__] if hasattr(tree, "_fields") else []
    return [name, [_pack_tree(child) for child in tree]]


def _unpack_tree(packed: Any) -> Tree:
    if isinstance(packed, Tensor):
        return packed
    record, children = packed
    values = [_unpack_tree(child) for child in children]
    if not record:
        return tuple(values)
    module, name = record
    kind: Any = getattr(sys.modules.get(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise ValueError(f"the checkpoint holds a {module}.{name}, which is unknown; import the module that defines it")
    return kind(*values)
