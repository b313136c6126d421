"""Runs that no longer learn are stopped; the error says why, in which round, and what to try."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedauc.interfaces import Algorithm, Phase
from fedauc.objectives.minimax import Minimax
from fedauc.trees import Tree

DUAL_LIMIT = 1e3
"""At the saddle α is minus the gap between the classes' mean scores, about the margin; far beyond, it diverges."""

SATURATED = 1e-10
"""A link whose slope is below this everywhere passes no gradient: float32 sigmoid scores are then 0 or 1."""

SCORE_LIMIT = float(2**24)
"""Beyond this, neighbouring float32 numbers are 2 apart: more than the margin of 1 that losses compare scores with."""


class TrainingStopped(RuntimeError):
    """Training cannot go on. The message says what happened, in which round, and what to try."""


class PendingCheck(NamedTuple):
    """What a round is judged by: how many of its weights are not finite, out of how many, and the diagnostics."""

    phase: Phase
    nonfinite: Tensor
    weights: int
    diagnostics: dict[str, Tensor]


class Advice(NamedTuple):
    """What the advice to the user depends on, besides the round: values of options.

    `learning_rate` is that of the first stage, None where it is not known; later stages may divide it.
    `has_scaled_inputs` says that the rows are of about unit size already, or no numbers that could be scaled.
    """

    learning_rate: float | None = None
    weighting: str = "clients"
    server_learning_rate: float | None = None
    has_scaled_inputs: bool = False


NO_ADVICE = Advice()
"""For checks that know of no options."""


class DivergenceMonitor:
    """Checks every round; on an accelerator it checks a whole cycle at once, so that no round waits for the device."""

    def __init__(self, algorithm: Algorithm, advice: Advice = NO_ADVICE) -> None:
        self._algorithm, self._advice = algorithm, advice
        self._pending: list[PendingCheck] = []

    def check_round(self, phase: Phase, shared: Tree, diagnostics: dict[str, Tensor]) -> None:
        """Stop on the first round that diverged. Buffers are not checked, since one may hold a mask of -inf."""
        weights = self._algorithm.extract_model(shared).weights
        is_cpu = weights.device.type == "cpu"
        # On a CPU a finite sum says in one pass that all weights are finite.
        all_finite = is_cpu and math.isfinite(weights.sum())
        nonfinite = torch.zeros(()) if all_finite else (~torch.isfinite(weights)).sum()
        self._pending.append(PendingCheck(phase, nonfinite, len(weights), diagnostics))
        if is_cpu or phase.ends_cycle:
            checks, self._pending = self._pending, []
            for check in checks:
                values = {name: float(value) for name, value in check.diagnostics.items()}
                check_values(self._algorithm, check.phase, int(check.nonfinite), check.weights, values, self._advice)


def check_values(
    algorithm: Algorithm,
    phase: Phase,
    nonfinite: int,
    weights: int,
    diagnostics: dict[str, float],
    advice: Advice = NO_ADVICE,
) -> None:
    """Stop on a diverging dual, then on weights or duals that are not finite."""
    alpha = diagnostics.get("alpha", 0.0)
    if abs(alpha) > DUAL_LIMIT and math.isfinite(alpha):
        what = f"the dual alpha is {alpha:.3g}, beyond {DUAL_LIMIT:g}: it diverges"
        raise _stop_training(algorithm, phase, what, advice)
    nonfinite += sum(not math.isfinite(value) for value in diagnostics.values())
    if nonfinite:
        total = weights + len(diagnostics)
        raise _stop_training(algorithm, phase, f"{nonfinite} of the {total} trained values are NaN or infinite", advice)


def check_scores(algorithm: Algorithm, phase: Phase, outputs: Tensor, advice: Advice = NO_ADVICE) -> None:
    """Stop on scores that are all the same, saturated or huge: such a scorer ranks nothing or gets no gradient."""
    nonfinite = int((~torch.isfinite(outputs)).sum())
    if nonfinite:
        what = f"{nonfinite} of {outputs.numel()} evaluation scores are NaN or infinite"
        raise _stop_training(algorithm, phase, what, advice)
    objective = algorithm.objective
    scores = objective.to_scores(outputs)
    dead = f"the scorer is dead: all {len(scores)} evaluation scores"
    if bool((scores == scores[:1]).all()):
        raise _stop_training(algorithm, phase, f"{dead} equal {float(scores.flatten()[0]):.6g}", advice)
    if objective.score == "sigmoid":
        slopes = objective.to_output_slopes(scores, torch.ones_like(scores))
        if float(slopes.max()) < SATURATED:
            raise _stop_training(algorithm, phase, f"{dead} are saturated, so no gradient flows", advice)
    typical = float(scores.abs().median())
    if typical > SCORE_LIMIT:
        what = (
            f"half of the evaluation scores are at least {typical:.3g} in size, beyond {SCORE_LIMIT:.3g}: they diverge"
        )
        raise _stop_training(algorithm, phase, what, advice)


def _stop_training(algorithm: Algorithm, phase: Phase, what: str, advice: Advice) -> TrainingStopped:
    """The error that says where training stopped, why, and what to try."""
    rate = float(phase.learning_rate if advice.learning_rate is None else advice.learning_rate)
    decayed = "" if phase.learning_rate == rate else f"; this stage trains with {phase.learning_rate:g}"
    remedy = f"try a smaller learning rate (now {rate:g}, say {rate / 10:g}{decayed})"
    if advice.server_learning_rate is not None:
        server_rate = advice.server_learning_rate
        remedy += f", a smaller server learning rate (now {server_rate:g}, say {server_rate / 10:g})"
    if isinstance(algorithm.objective, Minimax) and algorithm.objective.score == "identity":
        remedy += " or score='sigmoid', which bounds the scores"
    else:
        remedy += f", another initialisation, or {_choose_last_remedy(phase, advice)}"
    where = f"stopped in round {phase.round} (cycle {phase.cycle}, stage {phase.stage})"
    return TrainingStopped(f"{where}: {what}; {remedy}")


def _choose_last_remedy(phase: Phase, advice: Advice) -> str:
    """The remedy that is tried last, of those that the run does not follow already."""
    if advice.weighting != "clients":
        return "weighting='clients'"
    if not advice.has_scaled_inputs:
        return "inputs on a smaller scale"
    if phase.local_steps > 1:
        return f"fewer local steps (now {phase.local_steps}, say {max(1, phase.local_steps // 4)})"
    return f"more rows per local step (now {phase.batch.positives} positives and {phase.batch.negatives} negatives)"
