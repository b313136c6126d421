"""CIFAR-10 and CIFAR-100, one class against the rest."""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedauc import keys
from fedauc.data import bounds
from fedauc.data.cifar_names import CIFAR10_CLASSES, CIFAR100_CLASSES
from fedauc.data.dataset import Rows, Table
from fedauc.data.sources import Absent, File, Source, Stored, save
from fedauc.discovery import lookup

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
PIXELS = 3 * 32 * 32


class Version(NamedTuple):
    """One of the two official forms: an archive, the folder it unpacks to, and its files with their checksums."""

    archive: Source
    folder: str
    train: dict[str, str]
    test: dict[str, str]

    @property
    def members(self) -> dict[str, str]:
        """Every file, training first."""
        return self.train | self.test


@dataclass(frozen=True)
class Cifar(Stored):
    """What both share. The images stay uint8 `[n, 3, 32, 32]`.

    The official training images are split once more: `validation_rows` of them, of which `validation_positives` are
    positive, are for selection. Their defaults are the paper's counts, which came from a plain random draw.
    """

    versions: ClassVar[tuple[Version, ...]]
    classes: ClassVar[tuple[str, ...]]

    positive: str = "0"
    validation_rows: int = 5000
    validation_positives: int = 505

    def __post_init__(self) -> None:
        self._class()
        bounds.whole("validation_rows", self.validation_rows, least=0)
        bounds.whole("validation_positives", self.validation_positives, least=0)
        if self.validation_rows and not 0 < self.validation_positives < self.validation_rows:
            raise ValueError(
                f"validation_positives is {self.validation_positives}; it must be above 0 and below validation_rows, "
                f"{self.validation_rows}"
            )

    def files(self) -> tuple[File, ...]:
        """An archive, or all files of the folder it unpacks to, in whichever version is there."""
        for version in self.versions:
            folder = self.home / version.folder
            if all((folder / name).is_file() for name in version.members):
                return tuple(File(folder / name, checksum) for name, checksum in version.members.items())
            if (self.home / version.archive.name).is_file():
                return (File(self.home / version.archive.name, version.archive.checksum),)
        raise Absent(self.name, self.home, self.sources, "; ".join(self._lacking()))

    def _lacking(self) -> Iterator[str]:
        """What unpacked folders lack that are there in part."""
        for version in self.versions:
            folder = self.home / version.folder
            missing = [name for name in version.members if not (folder / name).is_file()]
            if len(missing) < len(version.members):
                yield f"{folder} lacks {', '.join(missing)}"

    def there(self) -> Iterator[tuple[Source, File]]:
        """Archives and unpacked files of both versions."""
        for version in self.versions:
            known = {self.home / version.folder / name: checksum for name, checksum in version.members.items()}
            known[self.home / version.archive.name] = version.archive.checksum
            yield from ((version.archive, File(path, known[path])) for path in known if path.is_file())

    def parse(self, files: tuple[File, ...], into: Path) -> dict[str, int]:
        """All images, training first, and their class numbers."""
        version = next(found for found in self.versions if _is_of(found, files[0].path))
        contents = dict(_contents(version, files))
        parts = [_decode(name, contents[name]) for name in version.members]
        images, labels = (np.concatenate(found) for found in zip(*parts, strict=True))
        save(into, "images", images)
        save(into, "labels", labels)
        return {"train": sum(len(part[1]) for part in parts[: len(version.train)])}

    def load(self, seed: int) -> Table:
        """The official test images, and the official training images split by the seed."""
        arrays, counts = self.parsed()
        positive = self._class()
        rows = Rows(arrays["images"], (arrays["labels"] == positive).astype(np.int8))
        train, test = rows.take(slice(0, counts["train"])), rows.take(slice(counts["train"], None))
        note = f"{self.name}, {self.classes[positive]!r} against the rest"
        if not self.validation_rows:
            return Table(train, None, test, note)
        held = self._held(train.labels, seed)
        return Table(train.take(np.flatnonzero(~held)), train.take(np.flatnonzero(held)), test, note)

    def _class(self) -> int:
        known = {name: place for place, name in enumerate(self.classes)}
        known |= {str(place): place for place in known.values()}
        return lookup("class", str(self.positive), known)

    def _held(self, labels: np.ndarray, seed: int) -> np.ndarray:
        held = np.zeros(len(labels), dtype=bool)
        wanted = {1: self.validation_positives, 0: self.validation_rows - self.validation_positives}
        for label, count in wanted.items():
            members = np.flatnonzero(labels == label)
            if count >= len(members):
                what = "validation_positives" if label else "validation_rows"
                raise ValueError(f"{what} asks for {count} of {len(members)} rows labelled {label}: lower it")
            held[members[keys.sample_indices(len(members), count, seed, "validation", label)]] = True
        return held


def _version(name: str, md5: str, folder: str, train: dict[str, str], test: dict[str, str]) -> Version:
    address = f"https://www.cs.toronto.edu/~kriz/{name}"
    return Version(Source(name, address, f"md5:{md5}", PAGE), folder, train, test)


CIFAR10_BINARY = _version(
    "cifar-10-binary.tar.gz",
    "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-batches-bin",
    {
        "data_batch_1.bin": "sha256:cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "sha256:a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "sha256:bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "sha256:014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "sha256:755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    },
    {"test_batch.bin": "sha256:8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"},
)
CIFAR10_PYTHON = _version(
    "cifar-10-python.tar.gz",
    "c58f30108f718f92721af3b95e74349a",
    "cifar-10-batches-py",
    {
        "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
        "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
        "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
    },
    {"test_batch": "md5:40351d587109b95175f43aff81a1287e"},
)
CIFAR100_BINARY = _version(
    "cifar-100-binary.tar.gz",
    "03b5dce01913d631647c71ecec9e9cb8",
    "cifar-100-binary",
    {"train.bin": "sha256:f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"},
    {"test.bin": "sha256:d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"},
)
CIFAR100_PYTHON = _version(
    "cifar-100-python.tar.gz",
    "eb9058c3a382ffc7106e4002c42a8d85",
    "cifar-100-python",
    {"train": "md5:16019d7e3df5f24257cddd939b257f8d"},
    {"test": "md5:f0ef6b0ae62326f3e7ffdfab6717acfc"},
)


@dataclass(frozen=True)
class Cifar10(Cifar):
    """60,000 photographs in 10 classes, one of them the positives."""

    name: ClassVar[str] = "cifar10"
    about: ClassVar[str] = "photographs, one class of 10 against the rest; Krizhevsky 2009, " + PAGE
    sources: ClassVar[tuple[Source, ...]] = (CIFAR10_BINARY.archive,)
    versions: ClassVar[tuple[Version, ...]] = (CIFAR10_BINARY, CIFAR10_PYTHON)
    classes: ClassVar[tuple[str, ...]] = CIFAR10_CLASSES


@dataclass(frozen=True)
class Cifar100(Cifar):
    """60,000 photographs in 100 classes, one of them the positives."""

    name: ClassVar[str] = "cifar100"
    about: ClassVar[str] = "photographs, one class of 100 against the rest; Krizhevsky 2009, " + PAGE
    sources: ClassVar[tuple[Source, ...]] = (CIFAR100_BINARY.archive,)
    versions: ClassVar[tuple[Version, ...]] = (CIFAR100_BINARY, CIFAR100_PYTHON)
    classes: ClassVar[tuple[str, ...]] = CIFAR100_CLASSES

    validation_positives: int = 46


# ------------------------------------------------------------------------------------------------- the official formats


def _is_of(version: Version, path: Path) -> bool:
    return path.name == version.archive.name or path.parent.name == version.folder


def _contents(version: Version, files: tuple[File, ...]) -> Iterator[tuple[str, bytes]]:
    """Every file of a version with its bytes, from the folder or from the archive."""
    if files[0].path.name != version.archive.name:
        for file in files:
            yield file.path.name, file.path.read_bytes()
        return
    path = files[0].path
    try:
        with tarfile.open(path, "r:gz") as archive:
            for name in version.members:
                stream = archive.extractfile(f"{version.folder}/{name}")
                assert stream is not None
                yield name, stream.read()
    except (tarfile.TarError, KeyError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}): delete it and fetch it again") from error


def _decode(name: str, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Images `[n, 3, 32, 32]` and class numbers `[n]` of a file: records of bytes, or a pickled dictionary."""
    if not name.endswith(".bin"):
        return _unpickle(name, content)
    # CIFAR-10 files are named batches and have one label byte; CIFAR-100 has the coarse label before the fine one.
    labels = 1 if "batch" in name else 2
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, labels + PIXELS)
    return records[:, labels:].reshape(-1, 3, 32, 32), records[:, labels - 1]


def _unpickle(name: str, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    try:
        held: dict[bytes, Any] = _Arrays(io.BytesIO(content), encoding="bytes").load()
    except pickle.UnpicklingError as error:
        raise ValueError(f"{name} is no file of CIFAR ({error}): delete it and fetch it again") from error
    labels = held[b"fine_labels"] if b"fine_labels" in held else held[b"labels"]
    return np.asarray(held[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32), np.asarray(labels, dtype=np.uint8)


class _Arrays(pickle.Unpickler):
    """Reads numpy arrays and plain values, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """The three names that a pickled array needs, under numpy's old name of its core or its new one."""
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return _encode
        raise pickle.UnpicklingError(f"{module}.{name} has no place in an image file")


def _encode(text: str, encoding: str) -> bytes:
    return text.encode(encoding)
