"""When: the stages of a run, and the phase of every round.

A stage is a number of cycles at one learning rate. Learning rates fall and stages lengthen by reciprocal factors, so
that their product stays constant, as the theory asks. A stage rule is a frozen dataclass; `Plan` turns its stages into
phases.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar, Literal, NamedTuple

from fedauc.interfaces import BatchSize, Phase

StageOutput = Literal["last", "cycle_mean", "round_mean"]
"""What a stage hands on: its last model, the mean over its cycles (the proof's), or over its rounds (as printed)."""


MAX_LOCAL_STEPS = 1_000_000
"""Beyond this a schedule has run away."""


class Stage(NamedTuple):
    """So many learning cycles at one learning rate and number of local steps."""

    cycles: int
    learning_rate: float
    local_steps: int


class Budget(NamedTuple):
    """What a stage rule divides up, and the shape of the schedule: rounds per cycle (K) and clients per round (M)."""

    cycles: int
    learning_rate: float
    local_steps: int
    cycle_length: int
    per_round: int


@dataclass(frozen=True)
class StageRule(ABC):
    """How cycles are divided into stages."""

    name: ClassVar[str]

    @abstractmethod
    def generate_stages(self, budget: Budget) -> Iterator[Stage]:
        """Stages without end; `stages` cuts them at the budget."""

    def divide_budget(self, budget: Budget) -> list[Stage]:
        """The stages that fill the budget's cycles, the last one cut short if need be."""
        found: list[Stage] = []
        left = budget.cycles
        for stage in self.generate_stages(budget):
            if stage.local_steps > MAX_LOCAL_STEPS:
                bound = f"it must be at most {MAX_LOCAL_STEPS}: let the learning rate fall less"
                raise ValueError(f"local_steps is {stage.local_steps} in stage {len(found)}; {bound}")
            found.append(stage._replace(cycles=min(stage.cycles, left)))
            left -= found[-1].cycles
            if left == 0:
                break
        return found


@dataclass(frozen=True)
class Constant(StageRule):
    """One stage, one learning rate."""

    name: ClassVar[str] = "constant"

    def generate_stages(self, budget: Budget) -> Iterator[Stage]:
        """The whole budget."""
        yield Stage(budget.cycles, budget.learning_rate, budget.local_steps)


@dataclass(frozen=True)
class Geometric(StageRule):
    """The paper's (initial length, decay, scale): η_s = η₀·decay^s, E_s = initial·scale^s.

    `local_steps="adaptive"` lengthens the local work as the step falls, I_s = I₀·sqrt(η₀/η_s), which is the paper's
    I_s ∝ 1/(K sqrt(M η_s)) at fixed K and M.

    >>> rule = Geometric(initial=1, decay=0.5, scale=2)
    >>> [(s.cycles, s.learning_rate) for s in rule.divide_budget(Budget(6, 0.1, 4, 8, 6))]
    [(1, 0.1), (2, 0.05), (3, 0.025)]
    """

    name: ClassVar[str] = "geometric"
    initial: int = 10
    decay: float = 0.5
    scale: float = 2.0
    local_steps: Literal["fixed", "adaptive"] = "fixed"

    def __post_init__(self) -> None:
        if self.initial < 1:
            raise ValueError(f"initial is {self.initial}; the first stage needs at least 1 cycle")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay is {self.decay}; it must be above 0 and at most 1")
        if not 1 <= self.scale < math.inf:
            raise ValueError(f"scale is {self.scale}; it must be at least 1: stages grow as the learning rate falls")
        if self.local_steps not in ("fixed", "adaptive"):
            raise ValueError(f"local_steps is {self.local_steps!r}; use 'fixed' or 'adaptive'")

    def generate_stages(self, budget: Budget) -> Iterator[Stage]:
        """Stage s lasts initial·scale^s cycles."""
        cycles, factor = float(self.initial), 1.0
        while True:
            growth = 1 / math.sqrt(factor) if self.local_steps == "adaptive" else 1.0
            yield Stage(round(cycles), budget.learning_rate * factor, max(1, round(budget.local_steps * growth)))
            cycles, factor = cycles * self.scale, factor * self.decay


@dataclass(frozen=True)
class Milestones(StageRule):
    """The step falls by `decay` at given shares of the cycles, as is usual for image models.

    >>> [(s.cycles, round(s.learning_rate, 6)) for s in Milestones().divide_budget(Budget(40, 0.1, 4, 8, 6))]
    [(20, 0.1), (10, 0.01), (10, 0.001)]
    """

    name: ClassVar[str] = "milestones"
    at: tuple[float, ...] = (0.5, 0.75)
    decay: float = 0.1

    def __post_init__(self) -> None:
        edges = (0.0, *self.at, 1.0)
        if any(not low < high for low, high in pairwise(edges)):
            raise ValueError(f"at is {self.at}; milestones must rise strictly between 0 and 1")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay is {self.decay}; it must be above 0 and at most 1")

    def generate_stages(self, budget: Budget) -> Iterator[Stage]:
        """One stage per stretch; stretches too short for a cycle vanish."""
        # Rounded up, so that even one cycle runs at the full learning rate; the slack keeps 0.1 * 30 at 3.
        ends = [math.ceil(share * budget.cycles - 1e-9) for share in (*self.at, 1.0)]
        for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if end > start:
                yield Stage(end - start, budget.learning_rate * self.decay**index, budget.local_steps)


@dataclass(frozen=True)
class Theory(StageRule):
    """The theorem's schedule from the step η₀, the PL constant μ and the smoothness ℓ, in normalised units.

    With μ₂ = 2 (the dual's curvature in the p-free form), L = ℓ + ℓ²/μ₂, L̂ = L + 2ℓ and c = (μ/L̂)/(5 + μ/L̂):
    η_s = η₀ e^{-cs}, T_s = 212/(η₀ min(ℓ, μ₂)) e^{cs}, I_s = max(1, 1/(K sqrt(M η_s))), E_s = T_s/(K I_s), and the
    proximal weight is 2ℓ (`prox`). The constants are the proof's, so stages are long.
    """

    name: ClassVar[str] = "theory"
    mu: float = 0.1
    ell: float = 1.0

    def __post_init__(self) -> None:
        if not self.ell < math.inf:
            raise ValueError(f"ell is {self.ell}; it must be finite")
        if not 0 < self.mu <= self.ell:
            raise ValueError(f"mu is {self.mu}; it must be above 0 and at most ell ({self.ell})")

    @property
    def proximal_weight(self) -> float:
        """The proximal weight that makes every stage's problem ℓ-strongly convex."""
        return 2 * self.ell

    def decay_exponent(self) -> float:
        """The exponent c by which the step shrinks per stage."""
        smooth = self.ell + self.ell**2 / 2 + 2 * self.ell
        return (self.mu / smooth) / (5 + self.mu / smooth)

    def generate_stages(self, budget: Budget) -> Iterator[Stage]:
        """Stage s, with the iterations T_s shared out over rounds of I_s steps."""
        stage = 0
        while True:
            growth = math.exp(self.decay_exponent() * stage)
            learning_rate = budget.learning_rate / growth
            iterations = 212 / (budget.learning_rate * min(self.ell, 2.0)) * growth
            local_steps = max(1, round(1 / (budget.cycle_length * math.sqrt(budget.per_round * learning_rate))))
            yield Stage(max(1, round(iterations / (budget.cycle_length * local_steps))), learning_rate, local_steps)
            stage += 1


STAGE_RULES: dict[str, type[StageRule]] = {rule.name: rule for rule in (Constant, Geometric, Milestones, Theory)}


class Plan:
    """The phase of every round, by random access.

    `scoring` tells which stages open with a cycle of scoring rounds.
    """

    def __init__(self, stages: list[Stage], cycle_length: int, batch: BatchSize, scoring: list[bool]) -> None:
        self._stages, self._cycle_length, self._batch, self._scoring = stages, cycle_length, batch, scoring
        lengths = [stage.cycles + opens for stage, opens in zip(stages, scoring, strict=True)]
        self._ends = list(accumulate(lengths))

    @property
    def total_rounds(self) -> int:
        """Rounds in the whole run, scoring rounds included."""
        return self._ends[-1] * self._cycle_length

    @property
    def stages(self) -> list[Stage]:
        """The stages, in order."""
        return list(self._stages)

    def phase(self, round: int) -> Phase:
        """What the plan says of a round."""
        cycle, place = divmod(round, self._cycle_length)
        index = bisect_right(self._ends, cycle)
        stage = self._stages[index]
        first = self._ends[index - 1] if index else 0
        last_of_cycle = place == self._cycle_length - 1
        return Phase(
            round=round,
            cycle=cycle,
            stage=index,
            learning_rate=stage.learning_rate,
            local_steps=stage.local_steps,
            batch=self._batch,
            scoring=self._scoring[index] and cycle == first,
            starts_stage=cycle == first and place == 0,
            ends_cycle=last_of_cycle,
            ends_stage=last_of_cycle and cycle == self._ends[index] - 1,
            learning_cycles=cycle + 1 - sum(self._scoring[: index + 1]),
        )
