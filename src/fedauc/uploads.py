"""From the clients' uploads to the change that the server merges: transforms, decoding, and the mean.

The engines and the federation call this one pipeline. A client runs `finish_visit`, which ends in what travels; the
server decodes that and takes the mean, from a stack (`reduce_stack`) or one upload after another (`UploadCollector`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from fedauc.interfaces import (
    Algorithm,
    Cohort,
    Download,
    Mean,
    Phase,
    ServerRound,
    Upload,
    UploadSize,
    UploadTransform,
)
from fedauc.privacy.fixed_point import sum_modulo
from fedauc.random_tensors import KeyedNoise, NoiseSource, SecretNoise, client_keys, fold_in
from fedauc.transforms._summing import SummingTransform
from fedauc.transforms.weighted_mean import RunningMean, WeightedMean
from fedauc.trees import (
    Tree,
    is_empty,
    send_to_device,
    tree_add,
    tree_at,
    tree_leaves,
    tree_map,
    tree_shapes,
    tree_stack,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class _UploadStack(Mean):
    """No mean at all: every upload, stacked."""

    def combine(self, uploads: Tree, weights: Tensor) -> Tree:
        """The uploads as they are."""
        return uploads


@dataclass(frozen=True, kw_only=True)
class ModularSum(RunningMean):
    """No mean yet but the sum modulo 2^32 of integers; the transform that encoded them makes it a mean."""

    def combine(self, uploads: Tree, weights: Tensor) -> Tree:
        """The sum over the clients, whose weights are equal."""
        return tree_map(sum_modulo, uploads)

    def add_upload(self, total: Tree, upload: Tree, weight: float) -> Tree:
        """The sum with one more upload: int32 addition wraps around, as integers modulo 2^32 do."""
        return upload if is_empty(total) else tree_add(total, upload)


class TransformedState(NamedTuple):
    """A client's state where transforms keep something: the algorithm's state, and one entry per transform."""

    algorithm: Tree
    transforms: tuple[Tree, ...]


class ReducedUploads(NamedTuple):
    """The mean upload of a cohort, and what its clients sent; None where the upload itself shows it."""

    upload: Upload
    size: UploadSize | None


@dataclass(frozen=True)
class UploadPipeline:
    """The transforms of a run in order, its mean, and the seed of their randomness.

    With a `secret`, the noise that the server adds comes from it instead of the seed.
    """

    transforms: tuple[UploadTransform, ...] = ()
    mean: Mean = WeightedMean()
    seed: int = 0
    secret: bytes | None = None

    def __post_init__(self) -> None:
        names = [transform.name for transform in self.transforms]
        for name, count in Counter(names).items():
            if count > 1:
                raise ValueError(f"transforms lists {name!r} {count} times; list each transform once")
        encoding = [transform.name for transform in self.transforms if transform.encodes]
        if len(encoding) > 1:
            reason = "what one of them encodes cannot be encoded again"
            raise ValueError(f"transforms holds {' and '.join(map(repr, encoding))}; {reason}: choose one of them")
        if encoding and names[-1] != encoding[0]:
            reason = f"{names[-1]!r} after it would see codes instead of numbers"
            raise ValueError(
                f"transforms holds {encoding[0]!r} before {names[-1]!r}; {reason}: list {encoding[0]!r} last"
            )

        if any(isinstance(transform, SummingTransform) for transform in self.transforms):
            if not isinstance(self.mean, (WeightedMean, ModularSum)):
                reason = f"{names[-1]!r} shows the server no single upload, which that mean needs"
                raise ValueError(f"mean is {self.mean.name!r}, but {reason}: use the mean 'weighted'")
            object.__setattr__(self, "mean", ModularSum())

    def on_each_rank(self) -> UploadPipeline:
        """The pipeline of each process of a distributed run: means that need every upload are taken after gathering."""
        if isinstance(self.mean, ModularSum):
            name = self.transforms[-1].name
            raise ValueError(f"transforms holds {name!r}, which runs in one process only: start without torchrun")
        return self if isinstance(self.mean, WeightedMean) else replace(self, mean=_UploadStack())

    @property
    def is_plain(self) -> bool:
        """Whether uploads are averaged with their weights and nothing else."""
        return not self.transforms and isinstance(self.mean, WeightedMean)

    @property
    def has_fixed_denominator(self) -> bool:
        """Whether sums are divided by the expected number of clients, whoever comes."""
        return any(transform.needs_fixed_denominator for transform in self.transforms)

    def skip_small_cohort(self, cohort: Cohort) -> Cohort:
        """The cohort, with nobody in it if fewer clients come than a transform needs."""
        due, last = len(cohort.clients) + len(cohort.absent), self.transforms[-1] if self.transforms else None
        least = last.least_clients(due) if isinstance(last, SummingTransform) else 0
        return cohort if len(cohort.clients) >= least else mark_all_absent(cohort)

    def initial_server_state(self, shared: Tree) -> Tree:
        """What the transforms keep at the server before the first round; `()` where none keeps anything."""
        states = tuple(transform.initial_server_state(shared) for transform in self.transforms)
        return () if all(map(is_empty, states)) else states

    def announce_state(self, server_state: Tree) -> Tree:
        """What the transforms at the server tell those at the clients; `()` where there is nothing to tell."""
        states = server_state or ((),) * len(self.transforms)
        pairs = zip(self.transforms, states, strict=True)
        announced = tuple(transform.announce(state) for transform, state in pairs)
        return () if all(map(is_empty, announced)) else announced

    def initial_client_state(self, algorithm: Algorithm, download: Download) -> Tree:
        """The state of a client before its first visit."""
        state = algorithm.initial_client_state(download)
        states = tuple(transform.initial_state(download.shared) for transform in self.transforms)
        return state if all(map(is_empty, states)) else TransformedState(state, states)

    def make_client_keys(self, cohort_round: int, clients: tuple[int, ...], device: torch.device) -> Tree:
        """The keys `[M]` of the clients' randomness in a round; `()` without transforms."""
        if not self.transforms:
            return ()
        return send_to_device(client_keys(clients, self.seed, "transform", cohort_round), device)

    def finish_visit(
        self, algorithm: Algorithm, download: Download, client_state: Tree, local: Tree, emitted: Tree, key: Tree
    ) -> tuple[Upload, Tree]:
        """What a client, or a stack of clients, sends after its local steps, and its new state."""
        upload, new_state = algorithm.finish(download, algorithm_state(client_state), local, emitted)
        if not self.transforms:
            return upload, new_state
        if not is_empty(upload.pool) and not algorithm.hands_scores_to_audit:
            self._check_pool_allowed()
        old = client_state.transforms if isinstance(client_state, TransformedState) else ((),) * len(self.transforms)
        announced, states = download.announced or ((),) * len(self.transforms), []
        for number, (transform, state) in enumerate(zip(self.transforms, old, strict=True)):
            upload, state = transform.client(upload, state, fold_in(key, number), announced[number])
            states.append(state)
        return upload, TransformedState(new_state, tuple(states)) if not all(map(is_empty, states)) else new_state

    def _check_pool_allowed(self) -> None:
        """Refuse an upload with a pool where a transform would protect the rest of it alone."""
        name = next((transform.name for transform in self.transforms if transform.refuses_pools), None)
        if name is not None:
            raise ValueError(
                f"transforms lists {name!r}, but the algorithm uploads a pool of values, such as raw scores, which "
                f"stay those of a single client: use an algorithm without a pool, or leave {name!r} out"
            )

    def decode_upload(self, upload: Upload, shared: Tree) -> Upload:
        """The upload as the mean takes it, from what was sent; `shared` shows the shapes of one client's change."""
        for transform in reversed(self.transforms):
            upload = transform.decode(upload, shared)
        return upload

    def measure_size(self, sent: Upload) -> UploadSize | None:
        """How much was sent; None without transforms."""
        leaves = tree_leaves(sent)
        numbers, size = sum(leaf.numel() for leaf in leaves), sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        return UploadSize(numbers, size) if self.transforms else None

    def reduce_stack(self, sent: Upload, shared: Tree, weights: Tensor) -> ReducedUploads:
        """The mean of a stack of uploads `[M, ...]`; weights are `[M]`."""
        upload = self.decode_upload(sent, shared)
        mean = upload.mean if is_empty(upload.mean) else self.combine_uploads(upload.mean, weights)
        return ReducedUploads(Upload(mean, upload.pool), self.measure_size(sent))

    def combine_uploads(self, uploads: Tree, weights: Tensor) -> Tree:
        """The mean of uploads `[M, ...]`; a result that has not the shapes of one upload is refused."""
        mean = self.mean.combine(uploads, weights)
        if isinstance(self.mean, (RunningMean, _UploadStack)):
            return mean
        shapes, expected = tree_shapes(mean), tree_shapes(tree_at(uploads, 0))
        if shapes != expected:
            needs = f"one upload has {expected}: combine the clients of each tensor, for example with tree_map"
            raise ValueError(
                f"mean {self.mean.name!r} has returned {shapes}; it must have the shapes of an upload; {needs}"
            )
        return mean

    def zero_mean(self, shared: Tree) -> Tree:
        """The mean over no clients, as `transform_mean` takes it."""
        zeros = tree_map(torch.zeros_like, shared)
        for transform in self.transforms:
            zeros = transform.zero_mean(zeros)
        return zeros

    def transform_mean(
        self, mean: Tree, server_state: Tree, cohort: Cohort, phase: Phase, shared: Tree = ()
    ) -> tuple[Tree, Tree]:
        """The mean after the transforms' work at the server, the last one's first, and their new state there.

        `shared` is the state that clients were sent: it shows the types and shapes of the result.
        """
        if is_empty(mean) or not self.transforms:
            return mean, server_state
        states = list(server_state or ((),) * len(self.transforms))
        # What the last transform did to an upload at the client is undone first.
        for number in reversed(range(len(self.transforms))):
            server_round = ServerRound(cohort, phase, self._make_noise(number, phase.round), shared)
            mean, states[number] = self.transforms[number].server(mean, states[number], server_round)
        return mean, () if all(map(is_empty, states)) else tuple(states)

    def _make_noise(self, number: int, round: int) -> NoiseSource:
        key = (self.seed, "server transform", number, round)
        return KeyedNoise(*key) if self.secret is None else SecretNoise(self.secret, *key)


class UploadCollector:
    """Takes one upload after another. Weighted means and sums need a running sum alone; others keep every upload."""

    def __init__(self, pipeline: UploadPipeline, shared: Tree) -> None:
        self._pipeline, self._shared = pipeline, shared
        self._total: Tree = ()
        self._uploads: list[Tree] = []
        self._weights: list[float] = []
        self._pools: list[Tree] = []
        self._sizes: list[UploadSize] = []

    def add_upload(self, sent: Upload, weight: float, factor: float = 1.0) -> None:
        """Add what a client has sent; its change is multiplied by the factor first."""
        mean, pool = self._pipeline.decode_upload(sent, self._shared)
        if factor != 1:
            mean = tree_map(lambda leaf: factor * leaf, mean)
        if isinstance(self._pipeline.mean, RunningMean):
            self._total = self._pipeline.mean.add_upload(self._total, mean, weight)
        elif not is_empty(mean):
            self._uploads.append(mean)
        self._weights.append(weight)
        self._pools.append(pool)
        if (size := self._pipeline.measure_size(sent)) is not None:
            self._sizes.append(size)

    def reduce_uploads(self) -> ReducedUploads:
        """The mean of what was added."""
        mean = self._total
        if self._uploads:
            stack = tree_stack(self._uploads)
            mean = self._pipeline.combine_uploads(stack, torch.tensor(self._weights, dtype=torch.float64))
        size = UploadSize(*map(sum, zip(*self._sizes, strict=True))) if self._sizes else None
        return ReducedUploads(Upload(mean, tree_stack(self._pools)), size)


def mark_all_absent(cohort: Cohort) -> Cohort:
    """The cohort of a round that is skipped: all clients count as absent; a fixed denominator stays."""
    return cohort._replace(clients=(), weights=(), absent=(*cohort.absent, *cohort.clients))


def algorithm_state(client_state: Tree) -> Tree:
    """The algorithm's part of a client's state."""
    return client_state.algorithm if isinstance(client_state, TransformedState) else client_state
