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

from fedauc.data.dataset import Rows, TableParts
from fedauc.data.io.stored import File, MissingFiles, Source, StoredDataset, save_array
from fedauc.data.splits import sample_rows
from fedauc.discovery import lookup
from fedauc.fields import check_fields, option

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
PIXELS = 3 * 32 * 32

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_CIFAR100_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""
CIFAR100_CLASSES = tuple(_CIFAR100_NAMES.split())


class Distribution(NamedTuple):
    """One of the two official forms: an archive, the folder it unpacks to, and its files with their checksums."""

    archive: Source
    folder: str
    train: dict[str, str]
    test: dict[str, str]

    @property
    def all_files(self) -> dict[str, str]:
        """Every file, training first."""
        return self.train | self.test


@dataclass(frozen=True)
class Cifar(StoredDataset):
    """What CIFAR-10 and CIFAR-100 share. The images stay uint8 `[n, 3, 32, 32]`.

    The official training images are split once more: `validation_rows` of them, of which `validation_positives` are
    positive, are for selection. The defaults are the paper's counts, which came from a random split.
    """

    distributions: ClassVar[tuple[Distribution, ...]]
    classes: ClassVar[tuple[str, ...]]

    positive: str = option("0", "The positive class, by name or number.")
    validation_rows: int = option(5000, "Training images held out for validation.", at_least=0)
    validation_positives: int = option(505, "Positives among the validation images.", at_least=0)

    def __post_init__(self) -> None:
        self._positive_class()
        check_fields(self)
        if self.validation_rows and not 0 < self.validation_positives < self.validation_rows:
            raise ValueError(
                f"validation_positives is {self.validation_positives}; it must be above 0 and below validation_rows, "
                f"{self.validation_rows}"
            )

    def find_files(self) -> tuple[File, ...]:
        """An archive, or all files of the folder it unpacks to, in whichever form exists."""
        incomplete = []
        for distribution in self.distributions:
            folder, archive = self.home_folder / distribution.folder, self.home_folder / distribution.archive.name
            missing = [name for name in distribution.all_files if not (folder / name).is_file()]
            if not missing:
                return tuple(File(folder / name, checksum) for name, checksum in distribution.all_files.items())
            if archive.is_file():
                return (File(archive, distribution.archive.checksum),)
            if len(missing) < len(distribution.all_files):
                incomplete.append(f"{folder} lacks {', '.join(missing)}")
        raise MissingFiles(self.name, self.home_folder, self.sources, "; ".join(incomplete))

    def existing_files(self) -> Iterator[tuple[Source, File]]:
        """Archives and unpacked files of both forms."""
        for distribution in self.distributions:
            folder = self.home_folder / distribution.folder
            checksums = {folder / name: checksum for name, checksum in distribution.all_files.items()}
            checksums[self.home_folder / distribution.archive.name] = distribution.archive.checksum
            for path, checksum in checksums.items():
                if path.is_file():
                    yield distribution.archive, File(path, checksum)

    def parse_files(self, files: tuple[File, ...], into: Path) -> dict[str, int]:
        """All images, training first, and their class numbers."""
        path = files[0].path
        distribution = next(
            known for known in self.distributions if path.name == known.archive.name or path.parent.name == known.folder
        )
        contents = dict(_read_contents(distribution, files))
        parts = [_decode_images(name, contents[name]) for name in distribution.all_files]
        images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        save_array(into, "images", images)
        save_array(into, "labels", labels)
        return {"train": sum(len(part[1]) for part in parts[: len(distribution.train)])}

    def load(self, seed: int) -> TableParts:
        """The official test images, and the official training images split by the seed."""
        arrays, parsed_counts = self.load_parsed()
        positive, train_rows = self._positive_class(), parsed_counts["train"]
        rows = Rows(arrays["images"], (arrays["labels"] == positive).astype(np.int8))
        train, test = rows.take(slice(train_rows)), rows.take(slice(train_rows, None))
        note = f"{self.name}, {self.classes[positive]!r} against the rest"
        if not self.validation_rows:
            return TableParts(train, None, test, note)
        counts = {1: self.validation_positives, 0: self.validation_rows - self.validation_positives}
        for label, count in counts.items():
            members = int((train.labels == label).sum())
            if count >= members:
                name = "validation_positives" if label else "validation_rows"
                raise ValueError(f"{name} asks for {count} of {members} rows labelled {label}: lower it")
        return TableParts(*sample_rows(train, counts, seed, "validation"), test, note)

    def _positive_class(self) -> int:
        numbers = {name: number for number, name in enumerate(self.classes)}
        numbers |= {str(number): number for number in numbers.values()}
        return lookup("class", str(self.positive), numbers)


def _describe_archive(name: str, checksum: str) -> Source:
    return Source(name, f"https://www.cs.toronto.edu/~kriz/{name}", checksum, PAGE)


CIFAR10_BINARY = Distribution(
    _describe_archive("cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"),
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
CIFAR10_PYTHON = Distribution(
    _describe_archive("cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a"),
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
CIFAR100_BINARY = Distribution(
    _describe_archive("cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8"),
    "cifar-100-binary",
    {"train.bin": "sha256:f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"},
    {"test.bin": "sha256:d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"},
)
CIFAR100_PYTHON = Distribution(
    _describe_archive("cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85"),
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
    distributions: ClassVar[tuple[Distribution, ...]] = (CIFAR10_BINARY, CIFAR10_PYTHON)
    classes: ClassVar[tuple[str, ...]] = CIFAR10_CLASSES


@dataclass(frozen=True)
class Cifar100(Cifar):
    """60,000 photographs in 100 classes, one of them the positives."""

    name: ClassVar[str] = "cifar100"
    about: ClassVar[str] = "photographs, one class of 100 against the rest; Krizhevsky 2009, " + PAGE
    sources: ClassVar[tuple[Source, ...]] = (CIFAR100_BINARY.archive,)
    distributions: ClassVar[tuple[Distribution, ...]] = (CIFAR100_BINARY, CIFAR100_PYTHON)
    classes: ClassVar[tuple[str, ...]] = CIFAR100_CLASSES

    validation_positives: int = option(46, "Positives among the validation images.", at_least=0)


def _read_contents(distribution: Distribution, files: tuple[File, ...]) -> Iterator[tuple[str, bytes]]:
    """Every file of a distribution with its bytes, from the folder or from the archive."""
    if files[0].path.name != distribution.archive.name:
        for file in files:
            yield file.path.name, file.path.read_bytes()
        return
    path = files[0].path
    try:
        with tarfile.open(path, "r:gz") as archive:
            for name in distribution.all_files:
                stream = archive.extractfile(f"{distribution.folder}/{name}")
                assert stream is not None
                yield name, stream.read()
    except (tarfile.TarError, KeyError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}): delete it and fetch it again") from error


def _decode_images(name: str, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Images `[n, 3, 32, 32]` and class numbers `[n]` of a file: records of bytes, or a pickled dictionary."""
    if name.endswith(".bin"):
        # CIFAR-10 files are called batches and have one label byte; CIFAR-100 has a coarse label before the fine one.
        label_bytes = 1 if "batch" in name else 2
        records = np.frombuffer(content, dtype=np.uint8).reshape(-1, label_bytes + PIXELS)
        return records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1]
    try:
        batch: dict[bytes, Any] = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except pickle.UnpicklingError as error:
        raise ValueError(f"{name} is no file of CIFAR ({error}): delete it and fetch it again") from error
    labels = batch[b"fine_labels" if b"fine_labels" in batch else b"labels"]
    return np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32), np.asarray(labels, dtype=np.uint8)


class _ArrayUnpickler(pickle.Unpickler):
    """Reads numpy arrays and plain values, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """The names that a pickled array needs, under the old or the new name of numpy's core module."""
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return str.encode
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in an image file")
