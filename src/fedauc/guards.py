"""Runs that no longer learn are stopped, and told why, in which round, and what to try."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedauc.interfaces import Algorithm, Phase
from fedauc.objectives.minimax import Minimax
from fedauc.trees import Tree

DUAL_LIMIT = 1e3
"""At the saddle α is minus the gap between the classes' mean scores, about the margin; far beyond, it has run away."""


SATURATED = 1e-10
"""A link whose slope is below this everywhere passes no gradient on: float32 sigmoid scores are then 0 or 1."""


class TrainingStopped(RuntimeError):
    """A run that cannot go on. The message says what happened, where, and what to try."""


class PendingCheck(NamedTuple):
    """What a round's end is judged by: how many weights are broken, of how many, and the vitals."""

    phase: Phase
    broken: Tensor
    weights: int
    vitals: dict[str, Tensor]


class DivergenceMonitor:
    """Looks at every round; on an accelerator it judges a cycle at once, so that no round waits for the device."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._seen: list[PendingCheck] = []

    def check_round(self, phase: Phase, shared: Tree, vitals: dict[str, Tensor]) -> None:
        """Stop on the first round that diverged (buffers are not looked at: one may hold a mask of -inf)."""
        weights = self._algorithm.extract_model(shared).weights
        self._seen.append(PendingCheck(phase, _count_nonfinite(weights), len(weights), vitals))
        if weights.device.type == "cpu" or phase.ends_cycle:
            seen, self._seen = self._seen, []
            for each in seen:
                values = {name: float(value) for name, value in each.vitals.items()}
                check_values(self._algorithm, each.phase, int(each.broken), each.weights, values)


def check_values(algorithm: Algorithm, phase: Phase, broken: int, weights: int, vitals: dict[str, float]) -> None:
    """Stop on a diverging dual, then on weights or duals that are not finite."""
    alpha = vitals.get("alpha", 0.0)
    if abs(alpha) > DUAL_LIMIT and math.isfinite(alpha):
        limit = f"the dual alpha is {alpha:.3g}, beyond {DUAL_LIMIT:g}"
        raise TrainingStopped(f"{_describe_phase(phase)}: {limit}: it diverges; {_suggest_remedy(algorithm, phase)}")
    broken += sum(not math.isfinite(value) for value in vitals.values())
    if broken:
        what = f"{broken} of the {weights + len(vitals)} trained values are NaN or infinite"
        raise TrainingStopped(f"{_describe_phase(phase)}: {what}; {_suggest_remedy(algorithm, phase)}")


def check_scores(algorithm: Algorithm, phase: Phase, outputs: Tensor) -> None:
    """Stop on scores that are all the same: a dead scorer ranks nothing and gets no gradient."""
    if not bool(torch.isfinite(outputs).all()):
        broken = int((~torch.isfinite(outputs)).sum())
        what = f"{broken} of {outputs.numel()} evaluation scores are NaN or infinite"
        raise TrainingStopped(f"{_describe_phase(phase)}: {what}; {_suggest_remedy(algorithm, phase)}")
    scores = algorithm.objective.to_scores(outputs)
    slopes = algorithm.objective.to_output_slopes(scores, torch.ones_like(scores))
    if bool((scores == scores[:1]).all()):
        what = f"the scorer is dead: all {len(scores)} evaluation scores equal {float(scores.flatten()[0]):.6g}"
        raise TrainingStopped(f"{_describe_phase(phase)}: {what}; {_suggest_remedy(algorithm, phase)}")
    if float(slopes.max()) < SATURATED:
        what = f"the scorer is dead: all {len(scores)} evaluation scores are saturated, so no gradient flows"
        raise TrainingStopped(f"{_describe_phase(phase)}: {what}; {_suggest_remedy(algorithm, phase)}")


def _count_nonfinite(weights: Tensor) -> Tensor:
    """How many are not finite. A finite sum says none, in one pass; only a sum that is not needs counting."""
    total = weights.sum()
    if weights.device.type == "cpu" and math.isfinite(total):
        return torch.zeros(())
    return (~torch.isfinite(weights)).sum()


def _describe_phase(phase: Phase) -> str:
    return f"stopped in round {phase.round} (cycle {phase.cycle}, stage {phase.stage})"


def _suggest_remedy(algorithm: Algorithm, phase: Phase) -> str:
    smaller = f"try a smaller learning rate (now {phase.learning_rate:g}, say {phase.learning_rate / 10:g})"
    if isinstance(algorithm.objective, Minimax) and algorithm.objective.score == "identity":
        return f"{smaller} or score='sigmoid', which bounds the scores"
    return f"{smaller}, another initialisation, or weighting='clients'"
