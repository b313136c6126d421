"""When: the stages of a run, and the phase of every round.

A stage is a number of cycles at one learning rate. Learning rates fall and stages lengthen by reciprocal factors, so
that their product stays constant, as the theory asks. A stage rule is a frozen dataclass; `Plan` turns its stages into
phases.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar, Literal, NamedTuple

from fedauc.discovery import find_members
from fedauc.fields import check_fields, option
from fedauc.interfaces import BatchSize, Phase

StageOutput = Literal["last", "cycle_mean", "round_mean", "ema"]
"""What a stage passes on: its last model, the mean over its cycles (as in the proof) or rounds (as printed), or the
exponential moving average over its rounds."""

MAX_LOCAL_STEPS = 1_000_000
"""A schedule that asks for more local steps than this is taken for a mistake."""

MAX_CYCLES = 1_000_000_000
"""A run of more cycles than this is taken for a mistake: at a millisecond each it would take twelve days."""

MAX_STAGES = 10_000
"""A schedule of more stages than this is taken for a mistake, and their learning rates would fall to zero."""


class Stage(NamedTuple):
    """A number of learning cycles at one learning rate and one number of local steps."""

    cycles: int
    learning_rate: float
    local_steps: int


class Budget(NamedTuple):
    """What a stage rule divides into stages, with the rounds per cycle (K) and the clients per round (M)."""

    cycles: int
    learning_rate: float
    local_steps: int
    cycle_length: int
    per_round: int


@dataclass(frozen=True)
class StageRule(ABC):
    """How the cycles of a run are divided into stages."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def generate_stages(self, budget: Budget) -> Iterator[Stage]:
        """Stages without end, or as many as the budget holds; `divide_budget` stops at the budget."""

    def divide_budget(self, budget: Budget) -> list[Stage]:
        """The stages that fill the cycles of the budget; the last one is shortened to fit."""
        stages: list[Stage] = []
        cycles_left = budget.cycles
        for stage in self.generate_stages(budget):
            if len(stages) == MAX_STAGES:
                remedy = "let stages grow faster, or lower cycles"
                raise ValueError(f"cycles is {budget.cycles}, which takes more than {MAX_STAGES} stages; {remedy}")
            if stage.local_steps > MAX_LOCAL_STEPS:
                bound = f"it must be at most {MAX_LOCAL_STEPS}: let the learning rate fall less"
                raise ValueError(f"local_steps is {stage.local_steps} in stage {len(stages)}; {bound}")
            stages.append(stage._replace(cycles=min(stage.cycles, cycles_left)))
            cycles_left -= stages[-1].cycles
            if cycles_left == 0:
                break
        return stages


@dataclass(frozen=True)
class Constant(StageRule):
    """A single stage with one learning rate."""

    name: ClassVar[str] = "constant"

    def generate_stages(self, budget: Budget) -> Iterator[Stage]:
        """One stage that takes the whole budget."""
        yield Stage(budget.cycles, budget.learning_rate, budget.local_steps)


@dataclass(frozen=True)
class Geometric(StageRule):
    """The paper's (initial length, decay, scale): η_s = η₀·decay^s, E_s = initial·scale^s.

    With `local_steps="adaptive"` the number of local steps grows as the learning rate falls, I_s = I₀·sqrt(η₀/η_s),
    which is the paper's I_s ∝ 1/(K sqrt(M η_s)) for fixed K and M.

    >>> rule = Geometric(initial=1, decay=0.5, scale=2)
    >>> [(s.cycles, s.learning_rate) for s in rule.divide_budget(Budget(6, 0.1, 4, 8, 6))]
    [(1, 0.1), (2, 0.05), (3, 0.025)]
    """

    name: ClassVar[str] = "geometric"
    initial: int = option(10, "Cycles of the first stage.", at_least=1)
    decay: float = option(0.5, "Factor by which the learning rate falls from stage to stage.", above=0, at_most=1)
    scale: float = option(2.0, "Factor by which the cycles grow from stage to stage.", at_least=1)
    local_steps: Literal["fixed", "adaptive"] = option(
        "fixed", "Whether the number of local steps stays the same or grows as the learning rate falls."
    )

    def generate_stages(self, budget: Budget) -> Iterator[Stage]:
        """Stage s has initial·scale^s cycles."""
        cycles, factor = float(min(self.initial, MAX_CYCLES)), 1.0
        while True:
            growth = 1 / math.sqrt(factor) if self.local_steps == "adaptive" else 1.0
            yield Stage(round(cycles), budget.learning_rate * factor, max(1, round(budget.local_steps * growth)))
            # Beyond the largest budget a longer stage is the same stage, and a learning rate of 0 stays above it.
            cycles, factor = min(cycles * self.scale, MAX_CYCLES), max(factor * self.decay, sys.float_info.min)


@dataclass(frozen=True)
class Milestones(StageRule):
    """The learning rate falls by `decay` at given shares of the cycles, as is usual for image models.

    >>> [(s.cycles, round(s.learning_rate, 6)) for s in Milestones().divide_budget(Budget(40, 0.1, 4, 8, 6))]
    [(20, 0.1), (10, 0.01), (10, 0.001)]
    """

    name: ClassVar[str] = "milestones"
    at: tuple[float, ...] = option((0.5, 0.75), "Shares of the cycles after which the learning rate falls.")
    decay: float = option(0.1, "Factor by which the learning rate falls.", above=0, at_most=1)

    def __post_init__(self) -> None:
        edges = (0.0, *self.at, 1.0)
        if any(not low < high for low, high in pairwise(edges)):
            raise ValueError(f"at is {self.at}; milestones must rise strictly between 0 and 1: sort them")
        super().__post_init__()

    def generate_stages(self, budget: Budget) -> Iterator[Stage]:
        """One stage between each two milestones; those that are too short for a cycle are left out."""
        # We round up, so that even a single cycle runs at the full learning rate. The slack keeps 0.1 * 30 at 3.
        ends = [math.ceil(share * budget.cycles - 1e-9) for share in (*self.at, 1.0)]
        for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if end > start:
                yield Stage(end - start, budget.learning_rate * self.decay**index, budget.local_steps)


@dataclass(frozen=True)
class Theory(StageRule):
    """The theorem's schedule, from the learning rate η₀, the PL constant μ and the smoothness ℓ in normalised units.

    With μ₂ = 2 (the dual's curvature in the p-free form), L = ℓ + ℓ²/μ₂, L̂ = L + 2ℓ and c = (μ/L̂)/(5 + μ/L̂):
    η_s = η₀ e^{-cs}, T_s = 212/(η₀ min(ℓ, μ₂)) e^{cs}, I_s = max(1, 1/(K sqrt(M η_s))), E_s = T_s/(K I_s), and the
    proximal weight is 2ℓ. The constants are those of the proof, so stages are long.
    """

    name: ClassVar[str] = "theory"
    mu: float = option(0.1, "The PL constant.", above=0)
    ell: float = option(1.0, "The smoothness constant.", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mu > self.ell:
            raise ValueError(f"mu is {self.mu}; it must be at most ell ({self.ell}): lower mu or raise ell")

    @property
    def proximal_weight(self) -> float:
        """The proximal weight that makes the problem of every stage ℓ-strongly convex."""
        return 2 * self.ell

    def decay_exponent(self) -> float:
        """The exponent c: the learning rate falls by e^{-c} from stage to stage."""
        smoothness = self.ell + self.ell**2 / 2 + 2 * self.ell
        return (self.mu / smoothness) / (5 + self.mu / smoothness)

    def generate_stages(self, budget: Budget) -> Iterator[Stage]:
        """Stage s, whose T_s iterations are divided into rounds of I_s local steps."""
        stage = 0
        while True:
            growth = math.exp(self.decay_exponent() * stage)
            learning_rate = budget.learning_rate / growth
            iterations = 212 / (budget.learning_rate * min(self.ell, 2.0)) * growth
            local_steps = max(1, round(1 / (budget.cycle_length * math.sqrt(budget.per_round * learning_rate))))
            yield Stage(max(1, round(iterations / (budget.cycle_length * local_steps))), learning_rate, local_steps)
            stage += 1


def find_stage_rules() -> dict[str, type[StageRule]]:
    """Every stage rule by name."""
    return find_members(__name__, StageRule)  # type: ignore[type-abstract]


class Plan:
    """The phase of every round, by random access. `scoring` says which stages begin with a cycle of scoring rounds."""

    def __init__(self, stages: list[Stage], cycle_length: int, batch: BatchSize, scoring: list[bool]) -> None:
        self._stages, self._cycle_length, self._batch, self._scoring = stages, cycle_length, batch, scoring
        lengths = [stage.cycles + scored for stage, scored in zip(stages, scoring, strict=True)]
        self._ends = list(accumulate(lengths))

    @property
    def total_rounds(self) -> int:
        """The number of rounds of the run, including scoring rounds."""
        return self._ends[-1] * self._cycle_length

    @property
    def scoring_rounds(self) -> int:
        """The number of rounds in which clients only score rows, so that later rounds have scores to compare with."""
        return sum(self._scoring) * self._cycle_length

    @property
    def local_steps(self) -> int:
        """Local steps that a client would take if it came in every learning round."""
        return sum(stage.cycles * stage.local_steps for stage in self._stages) * self._cycle_length

    @property
    def stages(self) -> list[Stage]:
        """The stages, in order."""
        return list(self._stages)

    def phase(self, round: int) -> Phase:
        """What the plan says about a round."""
        cycle, position = divmod(round, self._cycle_length)
        index = bisect_right(self._ends, cycle)
        stage = self._stages[index]
        first = self._ends[index - 1] if index else 0
        ends_cycle = position == self._cycle_length - 1
        return Phase(
            round=round,
            cycle=cycle,
            stage=index,
            learning_rate=stage.learning_rate,
            local_steps=stage.local_steps,
            batch=self._batch,
            scoring=self._scoring[index] and cycle == first,
            starts_stage=cycle == first and position == 0,
            ends_cycle=ends_cycle,
            ends_stage=ends_cycle and cycle == self._ends[index] - 1,
            learning_cycles=cycle + 1 - sum(self._scoring[: index + 1]),
        )
