"""`secure-sum` once the cohorts of a run, its scale and its noise are setting: what clients and sites compute with."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from fedauc.interfaces import ScoreHistogram, Upload
from fedauc.privacy.ciphers import RandomWords, stream_words
from fedauc.privacy.discrete_noise import sample_discrete_gaussian
from fedauc.privacy.fixed_point import FixedPoint
from fedauc.transforms.client_dp import list_change_leaves, map_upload
from fedauc.transforms.secure_sum import SecureSum
from fedauc.trees import Tree, is_empty, list_nodes

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, kw_only=True)
class PreparedSecureSum(SecureSum):
    """`secure-sum` with the noise of a client: its deviations in integer steps, for changes and for histograms.

    `survivors` is the least number of clients in any sum of the run. With a `secret`, noise comes from it and from the
    client's key; without, from the key alone.
    """

    survivors: int = 0
    deviations: tuple[float, float] = (0.0, 0.0)
    secret: bytes | None = field(default=None, repr=False)

    @staticmethod
    def of(transform: SecureSum, **values: Any) -> PreparedSecureSum:
        """A transform with these values of the run."""
        options = {setting.name: getattr(transform, setting.name) for setting in fields(SecureSum)}
        return PreparedSecureSum(**{**options, **values})

    def to_options(self) -> SecureSum:
        """The transform as a recipe holds it."""
        return SecureSum(**{setting.name: getattr(self, setting.name) for setting in fields(SecureSum)})

    def to_plain(self) -> dict[str, Any]:
        """What a site needs besides the recipe, as JSON values; the secret stays."""
        return {"survivors": self.survivors, "deviations": list(self.deviations)}

    @staticmethod
    def from_plain(transform: SecureSum, values: Mapping[str, Any], secret: bytes) -> PreparedSecureSum:
        """The transform of a site, whose noise comes from a secret of its own."""
        change, histogram = map(float, values["deviations"])
        survivors = int(values["survivors"])
        return PreparedSecureSum.of(transform, survivors=survivors, deviations=(change, histogram), secret=secret)

    @property
    def has_noise(self) -> bool:
        """Whether clients add noise."""
        return any(self.deviations)

    @property
    def largest_deviation(self) -> float:
        """The largest deviation of a client's noise, in integer steps."""
        return max(self.deviations)

    def least_clients(self, due: int) -> int:
        """As many as the threshold asks for, and as the noise was planned for."""
        return max(self.survivors, super().least_clients(due))

    def client(self, upload: Upload, state: Tree, key: Tensor, announced: Tree = ()) -> tuple[Upload, Tree]:
        """The change in fixed point with the client's noise, int32; a number out of range is refused."""
        encoded, state = super().client(upload, state, key, announced)
        if is_empty(upload.mean) or not self.has_noise:
            return encoded, state
        return encoded._replace(mean=self._add_noise(encoded.mean, key)), state

    def _add_noise(self, encoded: Tree, key: Tensor) -> Tree:
        """Independent discrete Gaussian noise for every number of every client, except the ends of histograms."""
        clients, code = max(key.numel(), 1), FixedPoint(self.scale, self.capacity)
        histograms = [histogram.masses for histogram in list_nodes(encoded, ScoreHistogram)]
        counts = [sum(leaf.numel() for leaf in part) // clients for part in (list_change_leaves(encoded), histograms)]
        drawn: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for number in key.flatten().tolist():
            words = self._open_words(number)
            for part, deviation, count in zip(drawn, self.deviations, counts, strict=True):
                integers = sample_discrete_gaussian(deviation, count, words) if deviation else np.zeros(count, np.int64)
                part.append(integers)
        stacks = [torch.from_numpy(np.stack(part)) for part in drawn]
        offsets = [0, 0]

        def add_part(leaf: Tensor, part: int) -> Tensor:
            start = offsets[part]
            offsets[part] += leaf.numel() // clients
            noise = stacks[part][:, start : offsets[part]].reshape(leaf.shape)
            return code.add_integers(leaf, noise.to(leaf.device))

        return map_upload(
            encoded,
            lambda leaf: add_part(leaf, 0),
            lambda histogram: histogram._replace(masses=add_part(histogram.masses, 1)),
        )

    def _open_words(self, key: int) -> RandomWords:
        """The random words of a client's noise in a round."""
        message = b"secure-sum noise" + struct.pack("<q", key)
        return stream_words(hashlib.blake2b(message, key=self.secret or b"", digest_size=32).digest())
