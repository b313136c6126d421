"""Datasets stored in files: where the files come from, whether they are intact, and a cache of the parsed arrays."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedauc.data.dataset import Dataset
from fedauc.fields import option
from fedauc.locks import LockBusy, hold_lock

FOLDER_VARIABLE = "FEDAUC_DATA"
"""The environment variable that names the folder of downloaded files."""

CHUNK = 1 << 20
"""Bytes read at once."""

MANIFEST = "manifest.json"
"""Lists the arrays of a parsed folder with their checksums; written last."""

PART = ".part-"
"""The prefix of a folder that is being filled."""

LOCK = ".lock"
"""The suffix of the lock file of such a folder."""


class Source(NamedTuple):
    """A published file: its name on disk, its address, its checksum (`md5:...`, empty where none is published).

    `url` is empty where a file cannot be downloaded; `page` is where a reader finds it and its terms.
    """

    name: str
    url: str
    checksum: str
    page: str


class File(NamedTuple):
    """A file on disk and the checksum it must have (empty: none is published).

    `published` is false for a file that is not publicly available; its checksum is known from the code alone.
    """

    path: Path
    checksum: str
    published: bool = True


class MissingFiles(ValueError):
    """A dataset needs files that do not exist; the message names the first one and where to get it.

    `partial` describes what is missing from another form of the dataset that exists in part.
    """

    def __init__(self, dataset: str, folder: Path, sources: tuple[Source, ...], partial: str = "") -> None:
        first, more = sources[0], f" and {len(sources) - 1} more" if len(sources) > 1 else ""
        get = f"run `fedauc data fetch {dataset}`, or get it from" if first.url else "get it:"
        suffix = f"; {partial}" if partial else ""
        super().__init__(f"{dataset} needs {first.name}{more} in {folder}: {get} {first.url or first.page}{suffix}")
        self.sources, self.partial = sources, partial


class ParsedArrays(NamedTuple):
    """Read-only memory-mapped arrays by name, and the counts that were stored with them."""

    arrays: dict[str, np.ndarray]
    counts: dict[str, int]


@dataclass(frozen=True)
class StoredDataset(Dataset):
    """A dataset whose files are in a folder: `folder`, else $FEDAUC_DATA, else ~/.cache/fedauc.

    A subclass gives `sources` and `parse_files`, which runs once: its arrays are cached there and memory-mapped.
    """

    sources: ClassVar[tuple[Source, ...]]
    path_fields: ClassVar[tuple[str, ...]] = ("folder",)

    folder: str = option("", "Folder of the files; $FEDAUC_DATA or ~/.cache/fedauc by default.")

    @property
    def home_folder(self) -> Path:
        """The folder of the files."""
        return resolve_folder(self.folder)

    def find_files(self) -> tuple[File, ...]:
        """The files that loading reads; raises `MissingFiles` where one does not exist."""
        try:
            missing = tuple(source for source in self.sources if not (self.home_folder / source.name).is_file())
        except OSError as error:
            reason = f"folder is {str(self.home_folder)[:80]!r}, which cannot be read ({error.strerror})"
            raise ValueError(f"{reason}; give the folder of the files") from error
        if missing:
            raise MissingFiles(self.name, self.home_folder, missing)
        return tuple(file for _, file in self.existing_files())

    def existing_files(self) -> Iterator[tuple[Source, File]]:
        """The files of the dataset that exist, complete or not, and the source of each."""
        for source in self.sources:
            path = self.home_folder / source.name
            if path.is_file():
                yield source, File(path, source.checksum, bool(source.url))

    @abstractmethod
    def parse_files(self, files: tuple[File, ...], into: Path) -> dict[str, int]:
        """Write arrays (`NAME.npy`) from files whose checksums are right; returns counts to store with them."""

    def cache_key(self) -> str:
        """What the parsed arrays depend on besides the files."""
        return ""

    def check_download(self, source: Source, path: Path) -> None:
        """Refuse a download without a published checksum that cannot be the right file, before it gets its name."""
        with path.open("rb") as stream:
            start = stream.read(CHUNK).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
        if not start or start.startswith((b"<!doctype", b"<html", b"<?xml")):
            raise ValueError(f"{path} is {'a web page' if start else 'empty'}")

    def check_content(self, source: Source, path: Path) -> None:
        """Refuse a file without a published checksum that cannot be the right one, whichever other files exist."""
        try:
            self.check_download(source, path)
        except ValueError as error:
            reason = str(error).removesuffix("; fetch it again")
            raise ValueError(f"{reason}; delete it and fetch it again") from None

    def parsed_folder(self) -> Path:
        """The folder of the parsed arrays: where they already exist, else where they can be written."""
        name = f"{self.name}-{files_fingerprint(self.find_files(), self.cache_key())}"
        candidates = [folder / name for folder in cache_folders(self.home_folder)]
        return next((folder for folder in candidates if folder.is_dir()), candidates[-1])

    def load_parsed(self) -> ParsedArrays:
        """The arrays, parsed on first use."""
        files, folder = self.find_files(), self.parsed_folder()

        def build(into: Path) -> dict[str, int]:
            for file in files:
                check_file(file)
            return self.parse_files(files, into)

        def checksums() -> dict[str, str]:
            return {file.path.name: file.checksum or file_digest(file.path) for file in files}

        return load_or_build(folder.parent, folder.name, build, checksums)


# ----------------------------------------------------------------------------------------------- folders and checksums


def resolve_folder(folder: str) -> Path:
    """The given folder, else $FEDAUC_DATA, else ~/.cache/fedauc."""
    chosen = folder or os.environ.get(FOLDER_VARIABLE)
    return Path(os.path.expanduser(chosen)) if chosen else _user_cache()


def cache_folders(folder: Path) -> tuple[Path, ...]:
    """Folders of parsed arrays: next to the files and, if that one is read-only, also in the user's cache."""
    beside = folder / "parsed"
    return (beside,) if is_writable(beside) else (beside, _user_cache() / "parsed")


def is_writable(folder: Path) -> bool:
    """Whether files can be written to a folder, or the folder can be created."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK)


def _user_cache() -> Path:
    return Path.home() / ".cache" / "fedauc"


def check_file(file: File) -> None:
    """Refuse a file whose checksum is wrong."""
    if mismatch := checksum_mismatch(file):
        remedy = "delete it and fetch it again" if file.published else "delete it, or put the right file there"
        raise ValueError(f"{file.path} is damaged or another file: {mismatch}; {remedy}")


def checksum_mismatch(file: File) -> str:
    """How a file's checksum differs from the expected one; empty where it does not, or none is known."""
    if not file.checksum:
        return ""
    actual = file_digest(file.path, file.checksum.partition(":")[0])
    which = "the published one" if file.published else "that of the file this dataset was made from, not published"
    return "" if actual == file.checksum else f"its {actual}, but {file.checksum} is {which}"


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """A file's checksum, written `algorithm:hex`."""
    with path.open("rb") as stream:
        return f"{algorithm}:{hashlib.file_digest(stream, algorithm).hexdigest()}"


def files_fingerprint(files: tuple[File, ...], key: str) -> str:
    """A short hash of files and a key: by checksum where one is published, else by size and modification time."""
    digest = hashlib.blake2b(key.encode(), digest_size=6)
    for file in files:
        state = file.path.stat()
        digest.update((file.checksum or f"{file.path.name} {state.st_size} {state.st_mtime_ns}").encode())
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------- cache of parsed arrays


def save_array(into: Path, name: str, array: np.ndarray) -> None:
    """Write one array of a parsed dataset."""
    np.save(into / f"{name}.npy", np.ascontiguousarray(array), allow_pickle=False)


def load_or_build(
    home: Path, name: str, build: Callable[[Path], dict[str, int]], sources: Callable[[], dict[str, str]] = dict
) -> ParsedArrays:
    """The arrays of the folder `home/name`, which `build` fills if it does not exist yet.

    The folder appears complete or not at all. `sources` gives the checksums of the files it is made from.
    """
    folder = home / name
    if not folder.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(home)
        _build_folder(folder, build, sources)
    return read_parsed(folder)


def read_parsed(folder: Path) -> ParsedArrays:
    """The arrays of a parsed folder; refuses one that has changed since it was written."""
    manifest = _read_manifest(folder)
    for name, checksum in manifest["arrays"].items():
        file = folder / f"{name}.npy"
        if not file.is_file() or file_digest(file) != f"sha256:{checksum}":
            raise _damage_error(file)
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in manifest["arrays"]}
    return ParsedArrays(arrays, manifest["counts"])


def recorded_sources(folder: Path) -> dict[str, str]:
    """The checksums, by file name, of the files that a folder was made from; empty where they were not recorded."""
    return dict(_read_manifest(folder).get("sources", {}))


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    try:
        manifest: Any = json.loads(file.read_text())
    except (FileNotFoundError, IsADirectoryError, ValueError):
        manifest = None
    if not isinstance(manifest, dict) or not all(isinstance(manifest.get(key), dict) for key in ("arrays", "counts")):
        raise _damage_error(file)
    if not manifest["arrays"] or not {array.stem for array in folder.glob("*.npy")} <= set(manifest["arrays"]):
        raise _damage_error(file)
    return manifest


def _damage_error(file: Path) -> ValueError:
    remedy = f"delete the folder {file.parent}, it will be made again from its sources"
    return ValueError(f"{file} is damaged: {remedy}")


def _build_folder(folder: Path, build: Callable[[Path], dict[str, int]], sources: Callable[[], dict[str, str]]) -> None:
    """Fill a temporary folder and rename it. Its lock, taken before it is made, shows that it is in use."""
    temporary = folder.with_name(f"{PART}{uuid.uuid4().hex}")
    part = temporary / folder.name
    # The name is unique, but another process may hold the lock for a moment to see whether the folder is abandoned.
    with hold_lock(temporary.with_name(temporary.name + LOCK), f"{temporary} is in use", seconds=60):
        part.mkdir(parents=True)
        try:
            checksums, counts = sources(), build(part)
            arrays = {file.stem: file_digest(file).removeprefix("sha256:") for file in sorted(part.glob("*.npy"))}
            manifest = {"arrays": arrays, "counts": counts, "sources": checksums}
            (part / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            try:
                part.rename(folder)
            except OSError:
                # Another process may have finished first, and its folder holds the same arrays.
                if not folder.is_dir():
                    raise
        finally:
            shutil.rmtree(temporary)


def _remove_abandoned(home: Path) -> None:
    """Remove the temporary folders of killed processes: those whose lock nobody holds."""
    for part in {path.with_name(path.name.removesuffix(LOCK)) for path in home.glob(f"{PART}*")}:
        try:
            with hold_lock(part.with_name(part.name + LOCK), f"{part} is in use") as exclusive:
                if exclusive:
                    shutil.rmtree(part, ignore_errors=True)
        except (LockBusy, OSError):
            continue
