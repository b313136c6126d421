"""Disks that forget what was not synced: real files under one folder, and a model of what a crash leaves of them.

The calls by which the library writes are replaced while a simulation runs. A file keeps the content of its last
`fsync`; what was written since may be lost or cut anywhere when the power fails. A folder keeps the entries of its last
`fsync`: later creations, renames and removals survive in their order up to any of them, each folder for itself. That is
what POSIX promises, and less than most file systems keep. When a process is killed all completed calls survive, and
only the write that is under way may be cut.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedauc import files

REMOVALS, RENAMES = ("unlink", "remove", "rmdir"), ("rename", "replace")


class ProcessKilled(BaseException):
    """A simulated process ends here. No handler of the library may catch it, as none can catch `kill -9`."""


@dataclass(eq=False)
class FileNode:
    """A file: its content at the last `fsync`, and its last content where it has lost its name since."""

    durable: bytes = b""
    last: bytes = b""


@dataclass(eq=False)
class FolderNode:
    """A folder: its entries, those of its last `fsync`, and the changes since, in their order."""

    entries: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)
    pending: list[dict[str, Node | None]] = field(default_factory=list)

    def change(self, changes: dict[str, Node | None]) -> None:
        """Change entries together, as a rename does; None removes one."""
        _apply(self.entries, changes)
        self.pending.append(changes)

    def sync(self, count: int | None = None) -> None:
        """Make the first `count` pending changes durable, or all."""
        for changes in self.pending[:count]:
            _apply(self.durable, changes)
        self.pending = [] if count is None else self.pending[count:]


Node = FileNode | FolderNode


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _apply(entries: dict[str, Node], changes: dict[str, Node | None]) -> None:
    for name, node in changes.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Disk:
    """The disk of a machine, whose files are real. `take_step` is called before every operation, and may kill."""

    def __init__(self, folder: Path, take_step: Callable[[str], None], generator: np.random.Generator) -> None:
        folder.mkdir()
        self.folder, self._take_step, self._generator = folder, take_step, generator
        self._root, self.is_full = FolderNode(), False
        self._image: dict[Path, bytes | None] | None = None
        self._prefix = f"{folder}/"
        self._written: tuple[FileNode, str] | None = None

    # ---------------------------------------------------------------------------------------------- operations

    def open_to_write(self, path: str) -> None:
        """A file is about to be opened to be written."""
        parent, name = self._find_parent(path)
        self._take_step(f"open {self._name(path)}")
        if name not in parent.entries:
            if self.is_full and self._generator.random() < 0.5:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            parent.change({name: FileNode()})

    def sync(self, path: str) -> None:
        """What was written to a file, or changed in a folder, is to be durable."""
        node = self._find(path)
        if isinstance(node, FolderNode):
            self._take_step(f"sync folder {self._name(path)}")
            node.sync()
            return
        self._written = (node, path)
        self._take_step(f"sync {self._name(path)}")
        self._written = None
        if self.is_full:
            os.truncate(path, len(self._cut(node.durable, _read(path))))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        node.durable = _read(path)

    def rename(self, source: str, target: str) -> None:
        """A file or a folder is about to get another name."""
        self._take_step(f"rename {self._name(source)} to {self._name(target)}")
        (old, old_name), (new, new_name) = self._find_parent(source), self._find_parent(target)
        self._remember_last(new, new_name, target)
        node = old.entries[old_name]
        if old is new:
            new.change({old_name: None, new_name: node})
        else:
            new.change({new_name: node})
            old.change({old_name: None})

    def remove(self, path: str) -> None:
        """A file or an empty folder is about to be removed."""
        parent, name = self._find_parent(path)
        if name in parent.entries:
            self._take_step(f"remove {self._name(path)}")
            self._remember_last(parent, name, path)
            parent.change({name: None})

    def make_folder(self, path: str) -> None:
        """A folder is about to be made."""
        if path == str(self.folder):
            return
        parent, name = self._find_parent(path)
        if name in parent.entries:
            return
        self._take_step(f"make folder {self._name(path)}")
        if self.is_full and self._generator.random() < 0.5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        parent.change({name: FolderNode()})

    # ------------------------------------------------------------------------------------------------- crashes

    def crash(self, loses_power: bool) -> None:
        """Note what is left on the disk at this instant; nothing that happens until `recover` counts."""
        if loses_power:
            self._image = self._image_after_power_loss()
            return
        image: dict[Path, bytes | None] = {
            path: path.read_bytes() for path in self.folder.rglob("*") if not path.is_dir()
        }
        if self._written is not None:
            node, path = self._written
            image[Path(path)] = self._cut(node.durable, _read(path))
        self._image = image

    def recover(self, loses_power: bool) -> None:
        """Give the files the contents that the crash has left."""
        image, self._image, self._written = self._image, None, None
        assert image is not None
        if not loses_power:
            for path, content in image.items():
                assert content is not None
                if path.read_bytes() != content:
                    path.write_bytes(content)
            return
        self.wipe()
        for path, content in image.items():
            if content is None:
                path.mkdir()
            else:
                path.write_bytes(content)
            node: Node = FolderNode() if content is None else FileNode(content)
            parent, name = self._find_parent(str(path))
            parent.entries[name] = parent.durable[name] = node

    def wipe(self) -> None:
        """Lose everything."""
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        self._root = FolderNode()

    def _image_after_power_loss(self) -> dict[Path, bytes | None]:
        contents: dict[FileNode, bytes] = {}
        folders: list[tuple[FolderNode, Path | None]] = [(self._root, self.folder)]
        seen = {self._root}
        for folder, path in folders:
            for name, node in folder.entries.items():
                if isinstance(node, FileNode) and path is not None:
                    contents[node] = (path / name).read_bytes()
            named = {name: node for name, node in folder.entries.items() if path is not None}
            unnamed: list[Node | None] = [*folder.durable.values()]
            unnamed += [node for changes in folder.pending for node in changes.values()]
            members: list[tuple[str, Node | None]] = [*named.items(), *(("", node) for node in unnamed)]
            for name, member in members:
                if isinstance(member, FolderNode) and member not in seen:
                    seen.add(member)
                    folders.append((member, path / name if name and path is not None else None))
        for folder, _ in folders:
            folder.sync(self._choose_count(len(folder.pending)))
        image: dict[Path, bytes | None] = {}

        def collect(folder: FolderNode, path: Path) -> None:
            for name, node in sorted(folder.durable.items()):
                if isinstance(node, FolderNode):
                    image[path / name] = None
                    collect(node, path / name)
                else:
                    image[path / name] = self._cut(node.durable, contents.get(node, node.last or node.durable))

        collect(self._root, self.folder)
        return image

    def _cut(self, durable: bytes, latest: bytes) -> bytes:
        """The durable content and a part of what was written since."""
        if latest.startswith(durable):
            return latest[: len(durable) + self._choose_count(len(latest) - len(durable))]
        return durable if self._generator.random() < 0.5 else latest[: self._choose_count(len(latest))]

    def _choose_count(self, count: int) -> int:
        """None, all, or any number in between, each a third of the time."""
        chosen = int(self._generator.integers(0, 3))
        return (0, count, int(self._generator.integers(0, count + 1)))[chosen]

    # --------------------------------------------------------------------------------------------------- names

    def _name(self, path: str) -> str:
        return path[len(self._prefix) :]

    def _find(self, path: str) -> Node:
        node: Node = self._root
        for name in self._name(path).split("/") if len(path) > len(self._prefix) else ():
            if not isinstance(node, FolderNode) or name not in node.entries:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            node = node.entries[name]
        return node

    def _find_parent(self, path: str) -> tuple[FolderNode, str]:
        """The folder that holds a path, and the name in it."""
        folder, _, name = path.rpartition("/")
        node = self._find(folder)
        if not isinstance(node, FolderNode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return node, name

    def _remember_last(self, parent: FolderNode, name: str, path: str) -> None:
        node = parent.entries.get(name)
        if isinstance(node, FileNode):
            node.last = _read(path)


class DiskLayer:
    """Replaces the calls by which files are written, for the paths of the disks of a simulation.

    `process` is the id of the simulated process whose code is running, and `living` holds those that have not ended.
    """

    def __init__(self, home: Path) -> None:
        self.disks = dict[str, Disk]()
        self.process, self.next_process, self.living = 0, 0, set[int]()
        self._prefix, self._bypassed = f"{home}/", 0
        self._real: dict[str, Any] = {name: getattr(os, name) for name in (*REMOVALS, *RENAMES, "fsync", "mkdir")}
        self._real_open, self._real_rmtree = io.open, shutil.rmtree

    def reset(self) -> None:
        """Begin another simulation."""
        self.disks.clear()
        self.living.clear()
        self.process = self.next_process = 0

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """Let calls through in a block: it is the simulation that writes."""
        self._bypassed += 1
        try:
            yield
        finally:
            self._bypassed -= 1

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the calls in a block."""
        replaced: dict[tuple[Any, str], Any] = {
            **{(os, name): self._make_removal(self._real[name]) for name in REMOVALS},
            **{(os, name): self._make_rename(self._real[name]) for name in RENAMES},
            (os, "fsync"): self._sync,
            (os, "mkdir"): self._make_folder,
            (os, "getpid"): lambda: self.process,
            (io, "open"): self._open_file,
            (builtins, "open"): self._open_file,
            (shutil, "rmtree"): self._remove_tree,
            (files, "is_process_alive"): self.living.__contains__,
        }
        originals = {(owner, name): getattr(owner, name) for owner, name in replaced}
        try:
            for (owner, name), call in replaced.items():
                setattr(owner, name, call)
            yield
        finally:
            for (owner, name), call in originals.items():
                setattr(owner, name, call)

    def _find(self, path: Any) -> tuple[Disk, str] | None:
        """The disk that a path, or an open file, belongs to."""
        if self._bypassed:
            return None
        if hasattr(path, "fileno"):
            path = path.fileno()
        text = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
        if not isinstance(text, str) or not text.startswith(self._prefix):
            return None
        disk = self.disks.get(text[len(self._prefix) :].partition("/")[0])
        return None if disk is None else (disk, text)

    def _open_file(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if set(mode) & set("wax+") and not isinstance(file, int) and (found := self._find(file)) is not None:
            disk, path = found
            disk.open_to_write(path)
        return self._real_open(file, mode, *arguments, **options)

    def _sync(self, descriptor: Any) -> None:
        if (found := self._find(descriptor)) is not None:
            disk, path = found
            disk.sync(path)

    def _make_folder(self, path: Any, mode: int = 0o777, **options: Any) -> None:
        if (found := self._find(path)) is not None:
            found[0].make_folder(found[1])
        self._real["mkdir"](path, mode, **options)

    def _make_removal(self, real: Callable[..., None]) -> Callable[..., None]:
        def remove(path: Any, **options: Any) -> None:
            if "dir_fd" not in options and (found := self._find(path)) is not None:
                found[0].remove(found[1])
            real(path, **options)

        return remove

    def _make_rename(self, real: Callable[..., None]) -> Callable[..., None]:
        def rename(source: Any, target: Any, **options: Any) -> None:
            if (found := self._find(source)) is not None:
                found[0].rename(found[1], os.fspath(target))
            real(source, target, **options)

        return rename

    def _remove_tree(self, path: Any, ignore_errors: bool = False, **options: Any) -> None:
        """Remove file by file, because the real function names files relative to open folders."""
        if (found := self._find(path)) is None:
            self._real_rmtree(path, ignore_errors, **options)
            return
        folder = Path(found[1])
        if ignore_errors and not folder.is_dir():
            return
        for member in sorted(folder.iterdir()):
            if member.is_dir():
                self._remove_tree(member)
            else:
                os.unlink(member)
        os.rmdir(folder)
