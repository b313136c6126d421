"""Example-level differential privacy: every client clips the gradient of each row and adds noise, in every local step.

    g = Σ_i clip(c_i ∇h_i, S) + σ S N(0, I),    S = clip / B,    clip(v, S) = v · min(1, S / ‖v‖)

h_i is the raw output for row i of the batch of B rows, and c_i the derivative of the batch's loss with respect to it,
which includes the weight of the row (about 1/B) and the slope of any surrogate. So `clip` bounds the gradient of a row
on the scale of a single example's loss, and S bounds what one occurrence of a row adds to the gradient of a step. The
inner algorithm takes its step with g, and sees nothing else of the rows.

Formal guarantee. If a row occurs at most m times in the batch, the step is a Gaussian mechanism with noise multiplier
σ / m for this row, against anyone who sees everything the client sends, the server included. Neighbouring data sets
differ in one row, whose contribution is zero in one of them. `privacy/example_accounting.py` bounds m and composes the
steps and visits. The guarantee needs that

- a row's output depends on no other row: each row runs through the network alone, and models with buffers are refused;
- rows enter the client's states and uploads through g alone: one pullback of the network per step, whose cotangent for
  a row does not depend on the other rows. Algorithms and wrappers declare this (`uploads_gradients_only`), each class
  for itself, since a subclass may upload more; `check_example_privacy` refuses others;
- nobody else knows the noise. A simulation draws it from the seed of the run, so that it can be repeated; a site of a
  federation draws a new secret in every visit. The generator is a fast hash and not a cryptographic one.

Not protected are the number of rows of each class, which the server knows, and the training loss in the records of a
simulation, which a site does not send.

Minimax methods also learn dual variables from scores. The contribution of a row to the derivatives with respect to
(a, b, α) is clipped to `dual_clip` / B in the same way. Gradient and duals then share the guarantee: both get noise of
multiplier √2 σ, and two such mechanisms compose to one of multiplier σ.

Pairwise methods with a histogram pool send how their scores are distributed. An occurrence of a row adds at most its
weight in the loss to the masses of its class in that step, and every step's masses get noise of √2 σ times the largest
weight of a row, so that gradient and histogram share the guarantee as well.

Abadi et al., Deep learning with differential privacy, CCS 2016. Rows are not sampled as that paper samples them, so
there is no amplification.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch

from fedauc.fields import option
from fedauc.interfaces import Algorithm, Batch, Download, ForwardPass, Model, Network, Wrapper
from fedauc.objectives.minimax import Duals, Minimax
from fedauc.random_tensors import fold_in, random_normal
from fedauc.trees import Tree, tree_map
from fedauc.wrappers._wrapped import WrappedAlgorithm, list_wrappers, unwrap_algorithm

if TYPE_CHECKING:
    from torch import Tensor

NUMBERS_AT_ONCE = 1 << 19
"""Up to so many numbers per client, a stack of clients computes the gradients of all its rows at once."""


@final
@dataclass(frozen=True, kw_only=True)
class ExampleDP(Wrapper):
    """Clips the gradient of every row and adds noise in every local step, so that no upload shows a single row."""

    name: ClassVar[str] = "example-dp"
    needs_keys: ClassVar[bool] = True
    uploads_gradients_only: ClassVar[bool] = True
    clip: float = option(1.0, "Largest norm of the gradient of one row's loss.", above=0, at_most=math.inf)
    noise_multiplier: float = option(
        1.0, "Standard deviation of the noise in units of the clipping bound; --epsilon sets it.", at_least=0
    )
    dual_clip: float = option(
        1.0, "Largest norm of one row's derivative of the dual variables.", above=0, at_most=math.inf
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("clip", "dual_clip"):
            if self.noise_multiplier and getattr(self, name) == math.inf:
                needs = f"noise of multiplier {self.noise_multiplier:g} needs a finite bound: lower {name}"
                raise ValueError(f"{name} is inf; {needs}, or set noise_multiplier to 0")

    def check_algorithm(self, algorithm: Algorithm, buffers: Collection[str]) -> None:
        """Refuse what would tell more about a row than its noised gradients."""
        check_example_privacy(algorithm, buffers)

    def step(
        self, inner: Algorithm, network: Network, download: Download, local: Tree, carried: Tree, batch: Batch
    ) -> tuple[Tree, Tree, Tree]:
        """The inner step, with noised gradients instead of gradients."""
        rows, multiplier, objective = batch.weights.shape[-1], self.noise_multiplier, inner.objective
        has_histogram = _has_histogram(unwrap_algorithm(inner))
        if isinstance(objective, Minimax) or has_histogram:
            multiplier *= math.sqrt(2)
        if isinstance(objective, Minimax):
            release = _Release(self.dual_clip / rows, multiplier, fold_in(batch.key, 1))
            inner = _replace_objective(inner, _NoisedMinimax(score=objective.score, inner=objective, release=release))
        private = _PrivateNetwork(network, _Release(self.clip / rows, multiplier, fold_in(batch.key, 0)))
        local, emitted = inner.step(private, download, local, batch)
        if has_histogram and multiplier:
            emitted = _add_histogram_noise(emitted, multiplier, download.phase.batch.positives, batch)
        return local, carried, emitted


def check_example_privacy(algorithm: Algorithm, buffers: Collection[str] = ()) -> None:
    """Refuse, with the reason, an algorithm or a model whose uploads are more than a function of noised gradients.

    `algorithm` has all its wrappers around it; `buffers` are the names of the model's buffers.
    """
    inner, wrappers = unwrap_algorithm(algorithm), list_wrappers(algorithm)
    if sum(isinstance(wrapper, ExampleDP) for wrapper in wrappers) > 1:
        raise ValueError("wrappers lists 'example-dp' twice; its noise is accounted once: list it once")
    if buffers:
        reason = "with such statistics the gradient of a row depends on the other rows of its batch"
        raise ValueError(
            f"wrappers lists 'example-dp', but the model has the buffer {next(iter(buffers))!r}; {reason}: use a model "
            "without buffers, such as one with norm='group'"
        )
    for wrapper in wrappers:
        if not _declares_gradients_only(wrapper):
            name = getattr(wrapper, "name", type(wrapper).__name__)
            raise ValueError(
                f"wrappers lists 'example-dp' beside {name!r}, which may use the rows in other ways than through the "
                "inner steps; set its uploads_gradients_only if it does not, or leave it out"
            )
    if reason := _find_leak(inner):
        raise ValueError(
            f"wrappers lists 'example-dp', but the algorithm {inner.name!r} {reason}: use a method whose clients "
            "upload nothing but what they learn from gradients, such as cycp-fedavg, a-scaffold or cycp-minimax, "
            "or a pairwise method with --algorithm.pool histogram"
        )


def _find_leak(algorithm: Algorithm) -> str:
    """What an algorithm uploads beside what it learns from gradients, as the end of a sentence; empty for nothing."""
    if _declares_gradients_only(algorithm) or _has_histogram(algorithm):
        return ""
    if algorithm.scoring_pass:
        return "uploads the scores of single rows, which noise on gradients does not hide"
    return "does not declare uploads_gradients_only"


def _has_histogram(algorithm: Algorithm) -> bool:
    """Whether every local step emits the masses of a score histogram, which get noise of their own."""
    return algorithm.emits_histograms


def _add_histogram_noise(masses: Tensor, multiplier: float, positives: int, batch: Batch) -> Tensor:
    """The masses of a step with noise, for each class in units of the largest weight of a row."""
    weights = torch.stack([batch.weights[..., :positives].amax(-1), batch.weights[..., positives:].amax(-1)], -1)
    normal = random_normal(fold_in(batch.key, 2), masses.shape[-2] * masses.shape[-1], masses.dtype)
    return masses + multiplier * weights[..., None] * normal.reshape(masses.shape)


def _declares_gradients_only(member: Algorithm | Wrapper) -> bool:
    """Whether the class itself declares it: a subclass may upload more than the class that it extends."""
    return bool(vars(type(member)).get("uploads_gradients_only", False))


def _replace_objective(algorithm: Algorithm, objective: Minimax) -> Algorithm:
    """The algorithm, inside the same wrappers, with another objective."""
    changes: dict[str, Any] = {"objective": objective}
    if isinstance(algorithm, WrappedAlgorithm):
        changes["inner"] = _replace_objective(algorithm.inner, objective)
    # A compiler cannot trace dataclasses.replace, which checks all fields again.
    replaced = object.__new__(type(algorithm))
    for name, value in {**vars(algorithm), **changes}.items():
        object.__setattr__(replaced, name, value)
    return replaced


# --------------------------------------------------------------------------------------------- the Gaussian mechanism


class _Release:
    """One release of a Gaussian mechanism: vectors clipped to `bound`, and noise of `multiplier * bound` on their sum.

    It can be used once, because a second sum with the same noise would reveal the difference of the two.
    """

    def __init__(self, bound: float, multiplier: float, key: Tensor) -> None:
        self._bound, self._multiplier, self._key = bound, multiplier, key
        self._used = False

    def start_release(self) -> None:
        """Refuse a second use."""
        if self._used:
            reason = "noise is drawn and accounted for one gradient per step"
            raise ValueError(f"the algorithm takes 2 gradients in one local step; {reason}: use it without example-dp")
        self._used = True

    def clip_vectors(self, vectors: Tensor) -> Tensor:
        """Vectors `[..., n]`, each at most `bound` long; one that is not finite becomes zero, as it has no bound."""
        norms = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
        # The factor of such a vector is zero or no number, so that its entries become zero or no numbers.
        return torch.nan_to_num(vectors * (self._bound / norms).clamp(max=1), nan=0.0)

    def add_noise(self, total: Tensor) -> Tensor:
        """The sum `[..., n]` of clipped vectors with noise."""
        if not self._multiplier:
            return total
        noise = random_normal(self._key, total.shape[-1], total.dtype)
        return total + self._multiplier * self._bound * noise


class _PrivateNetwork(Network):
    """A network whose pullback is a Gaussian mechanism: the clipped gradients of single rows, summed, with noise.

    Each row runs alone, so that no output and no gradient depends on another row, whatever the layers do. In a stack of
    M clients all rows run at once, as M B clients with a row each, unless their gradients would take much memory. One
    client, or a large model, runs row by row. Sums and norms are float32 at least; rounding what is released to the
    type of the weights comes after the noise.
    """

    def __init__(self, inner: Network, release: _Release) -> None:
        self._inner, self._release = inner, release

    def forward_pass(self, model: Model, inputs: Tensor) -> ForwardPass:
        """Outputs as usual; buffers stay as they were sent."""
        weights, lead = model.weights, model.weights.ndim - 1
        rows = inputs.shape[lead]
        # An engine may run a single client without stacking it, so that it cannot stand for several.
        at_once = lead == 1 and weights.shape[0] > 1 and rows * weights.shape[1] <= NUMBERS_AT_ONCE
        if at_once:
            one_row_each: Model = tree_map(lambda leaf: leaf.repeat_interleave(rows, 0), model)
            passes = [self._inner.forward_pass(one_row_each, inputs.flatten(0, 1)[:, None])]
            outputs = passes[0].outputs.reshape(*inputs.shape[:2], *passes[0].outputs.shape[2:])
        else:
            passes = [self._inner.forward_pass(model, inputs.narrow(lead, row, 1)) for row in range(rows)]
            outputs = torch.cat([forward.outputs for forward in passes], lead)

        def pullback(cotangent: Tensor) -> Tensor:
            self._release.start_release()
            if at_once:
                gradients = self._clip_gradients(passes[0].pullback(cotangent.flatten(0, 1)[:, None]))
                total = gradients.view(-1, rows, gradients.shape[1]).sum(1)
            else:
                cotangents = [cotangent.narrow(lead, row, 1) for row in range(rows)]
                pairs = zip(passes, cotangents, strict=True)
                total = torch.zeros_like(weights, dtype=torch.promote_types(weights.dtype, torch.float32))
                for forward, part in pairs:
                    total = total + self._clip_gradients(forward.pullback(part))
            return self._release.add_noise(total).to(weights.dtype)

        return ForwardPass(outputs, model.buffers, pullback)

    def _clip_gradients(self, gradients: Tensor) -> Tensor:
        wide = gradients.to(torch.promote_types(gradients.dtype, torch.float32))
        return self._release.clip_vectors(wide)


@dataclass(frozen=True, kw_only=True, eq=False)
class _NoisedMinimax(Minimax):
    """A minimax objective whose derivatives with respect to (a, b, α) are a Gaussian mechanism."""

    inner: Minimax
    release: _Release

    def __post_init__(self) -> None:
        """Nothing to check: `inner` has been checked."""

    def to_scores(self, outputs: Tensor) -> Tensor:
        """As the inner objective."""
        return self.inner.to_scores(outputs)

    def to_output_slopes(self, scores: Tensor, slopes: Tensor) -> Tensor:
        """As the inner objective."""
        return self.inner.to_output_slopes(scores, slopes)

    def saddle_slopes(self, scores: Tensor, labels: Tensor, weights: Tensor, duals: Duals) -> tuple[Tensor, Duals]:
        """The inner slopes of the scores; those of the duals from clipped contributions of the rows, with noise."""
        self.release.start_release()
        slopes, by_row = self.inner.saddle_slopes(
            scores[..., None], labels[..., None], weights[..., None], Duals(*(dual[..., None] for dual in duals))
        )
        # What is left without rows, -2 c₀ α, is no row's contribution.
        zeros = torch.zeros_like(scores)
        _, of_no_row = self.inner.saddle_slopes(zeros, torch.zeros_like(labels), torch.zeros_like(weights), duals)
        constant = torch.stack(of_no_row, -1)
        contributions = torch.stack(by_row, -1) - constant[..., None, :]
        wide = contributions.to(torch.promote_types(contributions.dtype, torch.float32))
        total = self.release.add_noise(self.release.clip_vectors(wide).sum(-2)).to(constant.dtype) + constant
        return slopes[..., 0], Duals(*total.unbind(-1))
