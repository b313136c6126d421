"""Files that a dataset needs: where they come from, where they lie, and whether they are the right ones."""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from fedauc.data.cache import Parsed, cached
from fedauc.data.dataset import Dataset

HOME = "FEDAUC_DATA"
"""The environment variable that names the folder of downloaded files."""

CHUNK = 1 << 20
"""Bytes read at once."""


class Source(NamedTuple):
    """A published file: its name on disk, its address, its checksum (`md5:...`, empty where none is published).

    `url` is empty where a file cannot be fetched; `page` is where a reader finds it and its terms.
    """

    name: str
    url: str
    checksum: str
    page: str


class File(NamedTuple):
    """A file that is there, and the checksum it must have (empty: none is published).

    `published` is false of a file that only some have, whose checksum is known from the code alone.
    """

    path: Path
    checksum: str
    published: bool = True


class Absent(ValueError):
    """Files that a dataset needs and that are not there; the message names the first and where to get it.

    `also` says what is missing of another form that is there in part.
    """

    def __init__(self, dataset: str, where: Path, sources: tuple[Source, ...], also: str = "") -> None:
        first, others = sources[0], f" and {len(sources) - 1} more" if len(sources) > 1 else ""
        get = f"run `fedauc data fetch {dataset}`, or get it from" if first.url else "get it:"
        or_else = f"; {also}" if also else ""
        super().__init__(f"{dataset} needs {first.name}{others} in {where}: {get} {first.url or first.page}{or_else}")
        self.sources, self.also = sources, also


@dataclass(frozen=True)
class Stored(Dataset):
    """A dataset whose files lie in a folder: `folder`, else $FEDAUC_DATA, else ~/.cache/fedauc.

    A member gives `sources`, and `parse`, which is run once: its arrays are kept in the folder and memory-mapped.
    """

    sources: ClassVar[tuple[Source, ...]]

    folder: str = ""

    @property
    def home(self) -> Path:
        """Where the files lie."""
        return home(self.folder)

    def files(self) -> tuple[File, ...]:
        """The files that loading reads; one line says what is missing and where to get it."""
        absent = tuple(source for source in self.sources if not (self.home / source.name).is_file())
        if absent:
            raise Absent(self.name, self.home, absent)
        return tuple(file for _, file in self.there())

    def there(self) -> Iterator[tuple[Source, File]]:
        """Whatever is there of the dataset, complete or not, and the source of each file."""
        for source in self.sources:
            path = self.home / source.name
            if path.is_file():
                yield source, File(path, source.checksum, bool(source.url))

    @abstractmethod
    def parse(self, files: tuple[File, ...], into: Path) -> dict[str, int]:
        """Write arrays (`NAME.npy`) from files known to be right; returns counts worth keeping, such as part sizes."""

    def key(self) -> str:
        """What the parsed arrays depend on besides the files."""
        return ""

    def looks_right(self, source: Source, path: Path) -> None:
        """Refuse what was fetched for a source without a checksum and cannot be it; told before it gets its name."""
        with path.open("rb") as stream:
            start = stream.read(CHUNK).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
        if not start or start.startswith((b"<!doctype", b"<html", b"<?xml")):
            raise ValueError(f"{path} is {'a web page' if start else 'empty'}")

    def examine(self, source: Source, path: Path) -> None:
        """Refuse a file without a checksum that cannot be the right one, whatever else is there."""
        try:
            self.looks_right(source, path)
        except ValueError as error:
            why = str(error).removesuffix("; fetch it again")
            raise ValueError(f"{why}; delete it and fetch it again") from None

    def place(self) -> Path:
        """Where the arrays are kept: where they are already, else where they can be."""
        name = f"{self.name}-{fingerprint(self.files(), self.key())}"
        places = [shelf / name for shelf in shelves(self.home)]
        return next((place for place in places if place.is_dir()), places[-1])

    def parsed(self) -> Parsed:
        """The arrays, parsed on first use."""
        files, place = self.files(), self.place()

        def build(into: Path) -> dict[str, int]:
            for file in files:
                check(file)
            return self.parse(files, into)

        return cached(place.parent, place.name, build, lambda: checksums(files))


def shelves(folder: Path) -> tuple[Path, ...]:
    """Folders of parsed arrays: beside the files, and in the user's cache where nothing can be written there."""
    own = folder / "parsed"
    return (own,) if writable(own) else (own, _cache() / "parsed")


def writable(folder: Path) -> bool:
    """Whether files may be written to a folder, or it may be made."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK)


def home(folder: str) -> Path:
    """The folder named, else $FEDAUC_DATA, else ~/.cache/fedauc."""
    named = folder or os.environ.get(HOME)
    return Path(os.path.expanduser(named)) if named else _cache()


def _cache() -> Path:
    return Path.home() / ".cache" / "fedauc"


def check(file: File) -> None:
    """Refuse a file whose checksum is not the published one, or the one that is known of a file not published."""
    if wrong := difference(file):
        remedy = "delete it and fetch it again" if file.published else "delete it, or put the right file there"
        raise ValueError(f"{file.path} is damaged or another file: {wrong}; {remedy}")


def difference(file: File) -> str:
    """How a file's checksum differs from the one it must have; nothing where it does not, or none is known."""
    if not file.checksum:
        return ""
    found = digest(file.path, file.checksum.partition(":")[0])
    which = "the published one" if file.published else "that of the file this dataset was made from, not published"
    return "" if found == file.checksum else f"its {found}, but {file.checksum} is {which}"


def checksums(files: tuple[File, ...]) -> dict[str, str]:
    """The checksum of each file by its name: the published one, else its own."""
    return {file.path.name: file.checksum or digest(file.path) for file in files}


def digest(path: Path, algorithm: str = "sha256") -> str:
    """A file's checksum, written `algorithm:hex`."""
    with path.open("rb") as stream:
        return f"{algorithm}:{hashlib.file_digest(stream, algorithm).hexdigest()}"


def fingerprint(files: tuple[File, ...], key: str) -> str:
    """A short name for parsed arrays: by checksum where one is published, else by size and time of change."""
    made = hashlib.blake2b(key.encode(), digest_size=6)
    for file in files:
        state = file.path.stat()
        made.update((file.checksum or f"{file.path.name} {state.st_size} {state.st_mtime_ns}").encode())
    return made.hexdigest()


def save(into: Path, name: str, array: np.ndarray) -> None:
    """Write one array of a parsed dataset."""
    np.save(into / f"{name}.npy", np.ascontiguousarray(array), allow_pickle=False)
