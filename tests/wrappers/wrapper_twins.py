"""Plain torch twins of a client's visit in every family, with torch's own optimizers. No algorithm is used here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Score = Callable[[Tensor, Tensor], Tensor]
"""Scores `[B]` from flat weights `[d]` and rows `[B, ...]`."""

MakeOptimizer = Callable[[list[Tensor], float], torch.optim.Optimizer]


class Rows(NamedTuple):
    """The rows of a local step, the number of positives among them (they come first), and their passive scores."""

    inputs: Tensor
    labels: Tensor
    weights: Tensor
    positives: int
    passive: Any = ()


class Start(NamedTuple):
    """What a visit starts from: weights, duals (a, b, α) if any, and the correction c - c_m of each of them, if any."""

    weights: Tensor
    duals: Tensor | None
    correction: Tensor | None
    dual_correction: Tensor | None


class End(NamedTuple):
    """Weights and duals after the visit, and the means of the raw gradients."""

    weights: Tensor
    duals: Tensor | None
    gradient: Tensor
    dual_gradient: Tensor | None


def run_visit(
    start: Start, batches: Sequence[Rows], score: Score, learning_rate: float, optimizer: MakeOptimizer, mu: float
) -> End:
    """The local steps of a client. The loss of a family is told by what the visit comes with."""
    weights, duals = start.weights.clone().requires_grad_(), start.duals
    stepper = optimizer([weights], learning_rate)
    gradients, dual_gradients = [], []
    for rows in batches:
        variables = None if duals is None else duals.clone().requires_grad_()
        loss = compute_loss(score(weights, rows.inputs), rows, variables)
        inputs = [weights] if variables is None else [weights, variables]
        gradient, *rest = torch.autograd.grad(loss, inputs)
        gradients.append(gradient)
        direction = gradient if start.correction is None else gradient + start.correction
        weights.grad = direction + mu * (weights.detach() - start.weights)
        stepper.step()
        if duals is not None:
            dual_gradients.append(rest[0])
            dual_direction = rest[0] if start.dual_correction is None else rest[0] + start.dual_correction
            # Descent in a and b, ascent in alpha.
            duals = duals - learning_rate * dual_direction * torch.tensor([1.0, 1.0, -1.0], dtype=duals.dtype)
    mean = torch.stack(gradients).mean(0)
    return End(weights.detach(), duals, mean, torch.stack(dual_gradients).mean(0) if dual_gradients else None)


def compute_loss(outputs: Tensor, rows: Rows, duals: Tensor | None) -> Tensor:
    """The logistic loss, the saddle of the square loss (with duals), or the pairwise sigmoid loss (with passive)."""
    if duals is not None:
        scores = torch.sigmoid(outputs)
        a, b, alpha = duals.unbind()
        positive = (scores - a) ** 2 - 2 * (1 + alpha) * scores
        negative = (scores - b) ** 2 + 2 * (1 + alpha) * scores
        return (rows.weights * (rows.labels * positive + (1 - rows.labels) * negative)).sum() - alpha**2
    if len(rows.passive):
        passive_positives, passive_negatives = rows.passive
        count, total = rows.positives, outputs.new_zeros(())
        for row, output in enumerate(outputs):
            gaps = output - passive_negatives if row < count else passive_positives - output
            total = total + rows.weights[row] * (1 / (1 + torch.exp(gaps))).mean()
        return total
    return (rows.weights * F.binary_cross_entropy_with_logits(outputs, rows.labels, reduction="none")).sum()
