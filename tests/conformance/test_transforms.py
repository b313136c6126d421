"""Every transform, mean and server optimizer passes the suite that is exported for those of others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from fedauc.interfaces import Mean, ServerOptimizer, Upload, UploadTransform
from fedauc.server_optimizers import find_server_optimizers
from fedauc.testing import check_mean, check_server_optimizer, check_transform
from fedauc.transforms import find_means, find_transforms
from fedauc.transforms.client_dp import ClientDP
from fedauc.transforms.quantize import Quantize
from fedauc.transforms.secure_sum import SecureSum
from fedauc.trees import Tree, tree_map

# Client-level privacy needs a budget or a noise multiplier.
PRIVATE = [
    ClientDP(noise_multiplier=0.5),
    ClientDP(noise_multiplier=0.5, bands=1),
    ClientDP(noise_multiplier=0.5, clip=0.01, clip_quantile=0.5),
]
TRANSFORMS = [
    # The suite has rounds of two clients, which secure sums take when they are told to.
    *(kind() for kind in find_transforms().values() if kind not in (ClientDP, SecureSum)),
    *PRIVATE,
    SecureSum(minimum_cohort=2),
    Quantize(bits=4, block=8, error_feedback=False),
]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
def test_every_transform_conforms(transform: UploadTransform) -> None:
    check_transform(transform)


@pytest.mark.parametrize("mean", [kind() for kind in find_means().values()], ids=repr)
def test_every_mean_conforms(mean: Mean) -> None:
    check_mean(mean)


@pytest.mark.parametrize("optimizer", [kind() for kind in find_server_optimizers().values()], ids=repr)
def test_every_server_optimizer_conforms(optimizer: ServerOptimizer) -> None:
    check_server_optimizer(optimizer)


@dataclass(frozen=True, kw_only=True)
class GlobalNoise(UploadTransform):
    """Draws from a global generator."""

    name: ClassVar[str] = "global-noise"

    def client(self, upload: Upload, state: Tree, key: Tensor, announced: Tree = ()) -> tuple[Upload, Tree]:
        return upload._replace(mean=tree_map(lambda leaf: leaf + torch.randn_like(leaf), upload.mean)), state


@dataclass(frozen=True, kw_only=True)
class HalfPrecision(UploadTransform):
    """Sends other tensors than it was given without saying so."""

    name: ClassVar[str] = "half"

    def client(self, upload: Upload, state: Tree, key: Tensor, announced: Tree = ()) -> tuple[Upload, Tree]:
        return upload._replace(mean=tree_map(torch.Tensor.half, upload.mean)), state


@dataclass(frozen=True, kw_only=True)
class FirstClient(Mean):
    """Depends on the order of the clients."""

    name: ClassVar[str] = "first"

    def combine(self, uploads: Tree, weights: Tensor) -> Tree:
        return tree_map(lambda leaf: leaf[0], uploads)


@dataclass(frozen=True, kw_only=True)
class Backwards(ServerOptimizer):
    """Moves against the change."""

    name: ClassVar[str] = "backwards"

    def update(self, change: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        return -change, state


def test_the_suite_finds_what_is_wrong() -> None:
    with torch.random.fork_rng(devices=[]), pytest.raises(AssertionError, match="each client gives alone"):
        check_transform(GlobalNoise())
    with pytest.raises(AssertionError, match="set `encodes = True`"):
        check_transform(HalfPrecision())
    with pytest.raises(AssertionError, match="order of the clients"):
        check_mean(FirstClient())
    with pytest.raises(AssertionError, match=r"Backwards is a class; check an instance: Backwards\(\)"):
        check_server_optimizer(Backwards)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="is no UploadTransform, which this suite is for"):
        check_transform(Backwards())  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="move the weights in their direction"):
        check_server_optimizer(Backwards())
