"""Sequences of token ids whose class shows in the words they use, and whose clients prefer different words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedauc import keys
from fedauc.data.dataset import Dataset, Rows, TableParts
from fedauc.fields import check_fields, option


@dataclass(frozen=True)
class SyntheticTokens(Dataset):
    """Every token of a row is drawn on its own: a word of the row's class with probability `signal`, else any word.

    The first tenth of the vocabulary is the words of the positives, the second those of the negatives. A client draws
    its other words with weights of its own, log-normal with standard deviation `shift`. Inputs are int64.
    """

    name: ClassVar[str] = "synthetic-tokens"
    about: ClassVar[str] = "sequences of token ids, generated from the seed; nothing to cite"

    clients: int = option(20, "Number of clients.", at_least=1)
    rows_per_client: int = option(100, "Training rows of each client.", at_least=2)
    length: int = option(16, "Tokens of a row.", at_least=1)
    vocabulary: int = option(100, "Number of different tokens.", at_least=10)
    positive_rate: float = option(0.2, "Fraction of the rows that are positive.", above=0, below=1)
    signal: float = option(0.15, "Probability that a token is a word of the row's class.", at_least=0, at_most=1)
    shift: float = option(1.0, "Standard deviation of the logarithm of a client's weights of words.", at_least=0)

    def __post_init__(self) -> None:
        check_fields(self)

    def load(self, seed: int) -> TableParts:
        """Three independent parts of one size; clients keep their weights."""
        logarithms = keys.numpy_generator(seed, "words").standard_normal((self.clients, self.vocabulary))
        weights = np.exp(self.shift * logarithms)
        edges = np.cumsum(weights / weights.sum(axis=1, keepdims=True), axis=1)
        train, validation, test = (self._generate_rows(edges, seed, part) for part in ("train", "validation", "test"))
        return TableParts(
            train, validation, test, f"{len(train.labels)} synthetic rows of {self.clients} clients to train on"
        )

    def _generate_rows(self, edges: np.ndarray, seed: int, part: str) -> Rows:
        size, generator = self.clients * self.rows_per_client, keys.numpy_generator(seed, "tokens", part)
        client = np.repeat(np.arange(self.clients), self.rows_per_client)
        labels = np.zeros(size, dtype=np.int8)
        labels[keys.sample_indices(size, max(2, round(self.positive_rate * size)), seed, "labels", part)] = 1
        uniform = generator.random((size, self.length))
        # Rounding may leave the last edge below 1.
        common = np.stack([np.searchsorted(edges[m], row) for m, row in zip(client, uniform, strict=True)])
        common = np.minimum(common, self.vocabulary - 1)
        tenth = self.vocabulary // 10
        class_words = generator.integers(0, tenth, (size, self.length)) + np.where(labels == 1, 0, tenth)[:, None]
        shows_class = generator.random((size, self.length)) < self.signal
        return Rows(np.where(shows_class, class_words, common).astype(np.int64), labels, client)
