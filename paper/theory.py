"""The rates of the paper's two PL theorems, measured: rounds and local steps to a gap ε, and the speed-up in M.

    python -m paper.theory                                  # the record, paper/records/theory.json, and its slopes
    python -m paper.theory_figure                           # the figure, drawn from the record
    python -m paper.theory --seeds 4 --out runs/theory      # a quick look

A linear scorer on the square AUC loss is a quadratic bowl whose optimum is known, flat along the bias: PL, but not
strongly convex. Both theorems ask for η_s ∝ ε_s, I_s ∝ 1/(K√(Mη_s)) and η_s E_s I_s constant, and promise an expected
gap of ε_s after stage s: local steps ∝ 1/(Mε), rounds ∝ K/√ε whatever M. The plan fixes what a stage costs; what is
measured is whether the gap falls with the learning rate although visits, and with them
the drift of unlike clients, grow.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from fedauc import keys
from fedauc.data.clients import Clients
from fedauc.experiments.assembly import assemble_training
from fedauc.experiments.checkpoint import write_atomically
from fedauc.experiments.recipe import Recipe
from fedauc.models.linear import Linear
from fedauc.objectives.minimax import Minimax
from fedauc.objectives.square import PairwiseSquare
from fedauc.stages import Budget, Geometric
from fedauc.version import VERSION

METHODS = ("cycp-minimax", "cycp-pairwise")
COHORTS = (1, 2, 4, 8)
CONTROL = 4
"""The cohort of the control with fixed local steps."""

RESAMPLES = 1000
"""Of the seeds, for 95 % intervals."""


@dataclass(frozen=True)
class Problem:
    """K groups of equally many shards, each shard around class centres of its own: the group's, moved once more.

    `clients` deals a group's shards out to M clients, so that every M works on the same rows and the same objective.
    """

    groups: int = 4
    shards: int = 8
    rows: int = 2048
    """Of each class in a shard: many more than a visit draws, so that its draws are nearly independent."""
    features: int = 4
    noise: float = 0.7
    between: float = 0.1
    """The standard deviation of the groups' centres, what makes cycles drift."""
    within: float = 0.1
    """That of the shards' about their group's, what makes visits drift."""
    seed: int = 0

    def table(self) -> np.ndarray:
        """Rows `[class, group, shard, row, feature]`, positives first."""
        rng = keys.numpy_generator(self.seed, "theory")
        shape = (2, self.groups, self.shards, 1, self.features)
        centres = np.array([0.5, -0.5]).reshape(2, 1, 1, 1, 1) / np.sqrt(self.features)
        centres = centres + rng.normal(0, self.between, (2, self.groups, 1, 1, self.features))
        centres = centres + rng.normal(0, self.within, shape)
        return np.asarray(centres + rng.normal(0, self.noise, (*shape[:3], self.rows, self.features)))

    def clients(self, per_group: int) -> Clients:
        """M clients to a group, each with its share of the group's shards."""
        if self.shards % per_group:
            raise ValueError(f"per_group is {per_group}; it must divide the {self.shards} shards of a group")
        share = self.shards // per_group
        owner = np.arange(self.groups * self.shards).repeat(self.rows) // share
        labels = np.array([1, 0]).repeat(len(owner))
        names, inputs = np.arange(self.groups * per_group), self.table().reshape(-1, self.features)
        return Clients.from_assignment(inputs, labels, np.tile(owner, 2), names, names // per_group)


class Bowl(NamedTuple):
    """F(w) = F* + (w - w*)ᵀH(w - w*)/2: the square AUC loss of a linear scorer, and φ of its minimax form."""

    optimum: np.ndarray
    curvature: np.ndarray

    def gap(self, weights: np.ndarray) -> float:
        """F(w) - F*."""
        off = weights - self.optimum
        return float(off @ self.curvature @ off / 2)


def bowl(problem: Problem) -> Bowl:
    """From F(w) = (1 - w·d)² + wᵀ(Σ₊ + Σ₋)w, with d the difference of the class means."""
    up, down = problem.table().reshape(2, -1, problem.features)
    gap = up.mean(0) - down.mean(0)
    half = np.outer(gap, gap) + np.cov(up.T, bias=True) + np.cov(down.T, bias=True)
    return Bowl(np.linalg.solve(half, gap), 2 * half)


@dataclass(frozen=True)
class Trial:
    """The theorems' stages with constants that a small problem can afford.

    The problem is convex, so the proximal weight need not be the theorem's 2ℓ, which would hold each stage close to
    where it starts and so ask for many more stages.
    """

    learning_rate: float = 0.05
    decay: float = 0.5
    stages: int = 8
    settled: int = 3
    """Stages that still show the start, and are not looked at."""
    local_steps: int = 8
    """I₀ for one client a round; M clients take I₀/√M steps."""
    travel: float = 3.0
    """η_s E_s K I_s, the same in every stage."""
    prox: float = 0.5
    growth: Literal["adaptive", "fixed"] = "adaptive"
    """Of the local steps; "fixed" is a control: as many rounds as local steps."""

    def recipe(self, method: str, groups: int, per_round: int, seed: int) -> Recipe:
        """One run: one pair a step, and the stage's mean over cycles, as the proof has it, goes on."""
        local_steps = max(1, round(self.local_steps / per_round**0.5))
        initial = max(1, round(self.travel / (self.learning_rate * groups * local_steps)))
        scale = self.decay ** (-1 if self.growth == "fixed" else -0.5)
        rule = Geometric(initial, self.decay, scale, self.growth)
        budget = Budget(1, self.learning_rate, local_steps, groups, per_round)
        own: dict[str, Any] = {"objective": PairwiseSquare()}
        if method == "cycp-minimax":
            own = {"objective": Minimax(score="identity"), "prox": self.prox}
        return Recipe.of(
            method,
            per_round=per_round,
            stages=rule,
            cycles=sum(stage.cycles for stage in islice(rule.generate_stages(budget), self.stages)),
            stage_output="cycle_mean",
            learning_rate=self.learning_rate,
            local_steps=local_steps,
            positives=1,
            negatives=1,
            seed=seed,
            dtype="float64",
            **own,
        )


class Curve(NamedTuple):
    """After each settled stage: rounds (scoring ones too) and local steps so far, and seeds' gaps `[seeds, stages]`."""

    rounds: np.ndarray
    steps: np.ndarray
    gaps: np.ndarray


def run(problem: Problem, trial: Trial, method: str, per_round: int, seed: int) -> Curve:
    """One run, watched at the ends of its stages."""
    recipe = trial.recipe(method, problem.groups, per_round, seed)
    training, _, start = assemble_training(
        recipe, Linear().build((problem.features,), seed), problem.clients(per_round)
    )
    shape, steps, found = bowl(problem), 0, []
    for finished in training.rounds(start):
        phase = finished.phase
        steps += 0 if phase.scoring else phase.local_steps
        if phase.ends_stage:
            weights = training.algorithm.extract_model(finished.state.server.shared).weights[: problem.features]
            found.append((phase.round + 1, steps, shape.gap(weights.numpy())))
    rounds, taken, gaps = np.array(found[trial.settled :]).T
    return Curve(rounds, taken, gaps[None])


def curve(problem: Problem, trial: Trial, method: str, per_round: int, seeds: Sequence[int]) -> Curve:
    """The same run with several seeds."""
    runs = [run(problem, trial, method, per_round, seed) for seed in seeds]
    return runs[0]._replace(gaps=np.concatenate([one.gaps for one in runs]))


Cost = Literal["rounds", "steps"]


def line(found: Curve, cost: Cost) -> np.ndarray:
    """The mean gap's power law, log gap = p[0] · log cost + p[1].

    The cost is exact and the gap noisy, so the fit is this way round.
    """
    return np.polyfit(np.log(getattr(found, cost)), np.log(found.gaps.mean(0)), 1)


def slope(curves: Sequence[Curve], cost: Cost) -> float:
    """How the cost grows with ε: the line's slope, its mean over the cohorts, turned round."""
    return 1 / float(np.mean([line(one, cost)[0] for one in curves]))


def alone(curves: Sequence[Curve], cost: Cost) -> tuple[float, ...]:
    """The slope of each cohort by itself."""
    return tuple(slope([one], cost) for one in curves)


def target(curves: Sequence[Curve]) -> float:
    """A gap that every cohort passes: the middle, on a log axis, of what they have in common."""
    means = [one.gaps.mean(0) for one in curves]
    return float(np.sqrt(max(mean[-1] for mean in means) * min(mean[0] for mean in means)))


def costs(curves: Sequence[Curve], cost: Cost) -> np.ndarray:
    """What each cohort pays for the gap that they have in common."""
    rate, level = np.array([line(one, cost) for one in curves]).T
    return np.asarray(np.exp((np.log(target(curves)) - level) / rate))


def speed_up(curves: Sequence[Curve], cost: Cost) -> float:
    """The slope of log cost, at one gap, on log M."""
    return float(np.polyfit(np.log(COHORTS), np.log(costs(curves, cost)), 1)[0])


def interval(statistic: Callable[[Sequence[Curve]], float | np.ndarray], curves: Sequence[Curve]) -> np.ndarray:
    """The bootstrap's 2.5 % and 97.5 % quantiles: whole runs are drawn anew, in each curve by itself."""
    rng = keys.numpy_generator("theory", "bootstrap")
    again = ([one._replace(gaps=rng.choice(one.gaps, len(one.gaps))) for one in curves] for _ in range(RESAMPLES))
    return np.asarray(np.quantile(np.array([statistic(drawn) for drawn in again]), [0.025, 0.975], axis=0))


def ideal(curves: Sequence[Curve], trial: Trial, cohorts: Sequence[int]) -> list[Curve]:
    """The same plans with a gap of exactly η_s/M: what the theorem gives on just these stages, rounding and all.

    The first stages' cost is a constant beside the power law, which the slopes -1/2 and -1 forget.
    """
    steps = trial.decay ** np.arange(trial.settled, trial.stages)[None]
    return [one._replace(gaps=steps / size) for one, size in zip(curves, cohorts, strict=True)]


class Findings(NamedTuple):
    """Per method a curve for each cohort, and one with fixed local steps."""

    main: dict[str, list[Curve]]
    fixed: dict[str, list[Curve]]


class Slope(NamedTuple):
    """The theorem's limit, what the plan itself gives, what was measured with its 95 % interval, and each curve's."""

    theorem: float
    plan: float
    measured: float
    low: float
    high: float
    alone: tuple[float, ...] = ()


def measure(problem: Problem, trial: Trial, seeds: Sequence[int]) -> Findings:
    """Every run."""
    fixed = replace(trial, growth="fixed")
    main = {name: [curve(problem, trial, name, size, seeds) for size in COHORTS] for name in METHODS}
    return Findings(main, {name: [curve(problem, fixed, name, CONTROL, seeds)] for name in METHODS})


def slopes(found: Findings, trial: Trial, method: str) -> dict[str, Slope]:
    """Every slope of one method."""
    main, fixed = found.main[method], found.fixed[method]

    def judged(statistic: Callable[[Sequence[Curve]], float], curves: Sequence[Curve], theorem: float) -> Slope:
        plan = statistic(ideal(curves, trial, COHORTS if curves is main else (CONTROL,)))
        return Slope(theorem, plan, statistic(curves), *interval(statistic, curves).tolist())

    def to_gap(cost: Cost, curves: Sequence[Curve], theorem: float) -> Slope:
        return judged(partial(slope, cost=cost), curves, theorem)._replace(alone=alone(curves, cost))

    return {
        "rounds to ε": to_gap("rounds", main, -0.5),
        "local steps to ε": to_gap("steps", main, -1),
        "rounds against M": judged(partial(speed_up, cost="rounds"), main, 0),
        "local steps against M": judged(partial(speed_up, cost="steps"), main, -1),
        "rounds to ε, I fixed": to_gap("rounds", fixed, -1),
    }


def markdown(found: Findings, trial: Trial) -> Iterator[str]:
    """The slopes as a table."""
    yield "| method | slope of | theorem | this plan | measured [95 %] | M = 1, 2, 4, 8 alone |"
    yield "|---|---|---|---|---|---|"
    for name in METHODS:
        for what, one in slopes(found, trial, name).items():
            own = ", ".join(f"{value:.2f}" for value in one.alone if len(one.alone) > 1)
            judged = f"{one.theorem:g} | {one.plan:.2f} | {one.measured:.2f} [{one.low:.2f}, {one.high:.2f}]"
            yield f"| {name} | {what} | {judged} | {own} |"


def record(problem: Problem, trial: Trial, found: Findings) -> dict[str, Any]:
    """All that the figure shows, and what it came from."""
    packages = {"fedauc": VERSION, "numpy": np.__version__, "torch": torch.__version__}
    return {
        "problem": asdict(problem),
        "trial": asdict(trial),
        "cohorts": COHORTS,
        "cohort with I fixed": CONTROL,
        "seeds": len(found.main[METHODS[0]][0].gaps),
        "versions": {"python": platform.python_version(), **packages},
        "slopes": {
            name: {what: _plain(**one._asdict()) for what, one in slopes(found, trial, name).items()}
            for name in METHODS
        },
        "curves": {
            kind: {name: [_plain(**one._asdict()) for one in curves] for name, curves in ones.items()}
            for kind, ones in found._asdict().items()
        },
    }


def _plain(**values: Any) -> dict[str, Any]:
    """For JSON, without digits that mean nothing."""
    return {
        name: np.vectorize(lambda one: float(f"{one:.5g}"), otypes=[float])(value).tolist()
        for name, value in values.items()
    }


def write(made: dict[str, Any], path: Path) -> None:
    """A record as JSON, a row of numbers to a line."""
    text = json.dumps(made, indent=1, ensure_ascii=False)
    folded = re.sub(r"\[[^\[\]{}]*\]", lambda row: " ".join(row[0].split()), text)
    write_atomically(path, f"{folded}\n".encode())


def read(path: Path) -> tuple[Findings, Trial]:
    """What `write` wrote."""
    made = json.loads(path.read_text(encoding="utf-8"))
    curves = {
        kind: {
            name: [Curve(**{field: np.array(value) for field, value in one.items()}) for one in ones]
            for name, ones in methods.items()
        }
        for kind, methods in made["curves"].items()
    }
    return Findings(**curves), Trial(**made["trial"])


def main() -> None:
    """Measure, write the record and print the slopes."""
    parser = argparse.ArgumentParser(description="The rates of the PL theorems, measured.")
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("paper/records"))
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error(f"--seeds is {arguments.seeds}; an interval needs at least 2")
    torch.set_num_threads(1)
    problem, trial = Problem(), Trial()
    found = measure(problem, trial, range(arguments.seeds))
    arguments.out.mkdir(parents=True, exist_ok=True)
    write(record(problem, trial, found), arguments.out / "theory.json")
    print("\n".join(markdown(found, trial)))


if __name__ == "__main__":
    main()
