"""The rates of the paper's two PL theorems, measured: rounds and local steps to a gap ε, and the speed-up in M.

    python -m paper.theory                                  # the record, paper/records/theory.json, and its slopes
    python -m paper.theory_figure                           # the figure, drawn from the record
    python -m paper.theory --seeds 4 --out runs/theory      # a quick look

A linear model with the square AUC loss has a quadratic objective with a known optimum. It is flat along the bias, so it
satisfies the PL condition but is not strongly convex. Both theorems ask for η_s ∝ ε_s, I_s ∝ 1/(K√(Mη_s)) and a
constant η_s E_s I_s. They promise an expected gap of ε_s after stage s: local steps ∝ 1/(Mε), and rounds ∝ K/√ε
independent of M. The plan fixes what a stage costs. What is measured is whether the gap falls with the learning
rate, although visits become longer and the clients, which differ, drift further apart.
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
from fedauc.experiments.recipe import Recipe
from fedauc.files import write_atomically
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
"""Resamples of the seeds for 95 % intervals."""


@dataclass(frozen=True)
class Problem:
    """K groups with the same number of shards. The class centres of a shard are those of its group with an offset.

    `partition_clients` partitions the shards of a group over M clients, so that the objective is the same for all M.
    """

    groups: int = 4
    shards: int = 8
    rows: int = 2048
    """Rows of each class in a shard: many more than a visit samples, so that its samples are nearly independent."""
    features: int = 4
    noise: float = 0.7
    between: float = 0.1
    """Standard deviation of the centres of groups, which makes cycles drift."""
    within: float = 0.1
    """Standard deviation of the centres of shards within a group, which makes visits drift."""
    seed: int = 0

    def draw_rows(self) -> np.ndarray:
        """Rows `[class, group, shard, row, feature]`, positives first."""
        rng = keys.numpy_generator(self.seed, "theory")
        shape = (2, self.groups, self.shards, 1, self.features)
        centres = np.array([0.5, -0.5]).reshape(2, 1, 1, 1, 1) / np.sqrt(self.features)
        centres = centres + rng.normal(0, self.between, (2, self.groups, 1, 1, self.features))
        centres = centres + rng.normal(0, self.within, shape)
        return np.asarray(centres + rng.normal(0, self.noise, (*shape[:3], self.rows, self.features)))

    def partition_clients(self, per_group: int) -> Clients:
        """M clients per group, each with its share of the shards."""
        if self.shards % per_group:
            raise ValueError(f"per_group is {per_group}; it must divide the {self.shards} shards of a group")
        share = self.shards // per_group
        owner = np.arange(self.groups * self.shards).repeat(self.rows) // share
        labels = np.array([1, 0]).repeat(len(owner))
        names, inputs = np.arange(self.groups * per_group), self.draw_rows().reshape(-1, self.features)
        return Clients.from_assignment(inputs, labels, np.tile(owner, 2), names, names // per_group)


class Quadratic(NamedTuple):
    """F(w) = F* + (w - w*)ᵀH(w - w*)/2: the square AUC loss of a linear model, and φ of its minimax form."""

    optimum: np.ndarray
    curvature: np.ndarray

    def gap(self, weights: np.ndarray) -> float:
        """F(w) - F*."""
        off = weights - self.optimum
        return float(off @ self.curvature @ off / 2)


def solve_rows(rows: np.ndarray) -> Quadratic:
    """The objective F(w) = (1 - w·d)² + wᵀ(Σ₊ + Σ₋)w of rows `[class, ..., feature]`, where d is μ₊ - μ₋."""
    up, down = rows.reshape(2, -1, rows.shape[-1])
    gap = up.mean(0) - down.mean(0)
    half = np.outer(gap, gap) + np.cov(up.T, bias=True) + np.cov(down.T, bias=True)
    return Quadratic(np.linalg.solve(half, gap), 2 * half)


@dataclass(frozen=True)
class Trial:
    """The stages of the theorems with constants that a small problem can afford.

    The problem is convex, so the proximal weight need not be the theorem's 2ℓ, which would keep each stage close to its
    start and require many more stages.
    """

    learning_rate: float = 0.1
    decay: float = 0.25
    """A power of 1/4, so that local steps and cycles double from stage to stage and nothing is rounded."""
    stages: int = 4
    settled: int = 1
    """The first stages, which still depend on the start and are not evaluated."""
    local_steps: int = 6
    """I₀ for one client per round; with M clients each takes the whole number nearest to I₀/√M."""
    travel: float = 4.8
    """η_s E_s K I_s, the same in every stage and for every M."""
    prox: float = 0.5
    growth: Literal["adaptive", "fixed"] = "adaptive"
    """How local steps grow. "fixed" is the control, in which rounds grow like local steps."""

    def recipe(self, method: str, groups: int, per_round: int, seed: int) -> Recipe:
        """The recipe of a run: one pair per step, and each stage hands on its mean over cycles, as in the proof."""
        local_steps = max(1, round(self.local_steps / per_round**0.5))
        cycles = self.travel / (self.learning_rate * groups * local_steps)
        if abs(cycles - (initial := round(cycles))) > 1e-9 or not initial:
            raise ValueError(
                f"travel is {self.travel:g}, which is {cycles:.3g} cycles of {groups} visits of {local_steps} steps at "
                f"learning rate {self.learning_rate:g}; it must be a whole number of cycles: change travel"
            )
        scale = self.decay ** (-1 if self.growth == "fixed" else -0.5)
        rule = Geometric(initial, self.decay, scale, self.growth)
        budget = Budget(1, self.learning_rate, local_steps, groups, per_round)
        settings: dict[str, Any] = {"objective": PairwiseSquare()}
        if method == "cycp-minimax":
            settings = {"objective": Minimax(score="identity"), "prox": self.prox}
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
            weighting="clients",
            seed=seed,
            dtype="float64",
            **settings,
        )


class Curve(NamedTuple):
    """Rounds (with scoring rounds) and local steps up to each evaluated stage, and the gaps `[seeds, stages]`."""

    rounds: np.ndarray
    steps: np.ndarray
    gaps: np.ndarray


def run_trial(problem: Problem, trial: Trial, method: str, per_round: int, seed: int) -> Curve:
    """One run, evaluated at the ends of its stages."""
    recipe = trial.recipe(method, problem.groups, per_round, seed)
    training, _, start = assemble_training(
        recipe, Linear().build((problem.features,), seed), problem.partition_clients(per_round)
    )
    objective, steps, stage_ends = solve_rows(problem.draw_rows()), 0, []
    for finished in training.rounds(start):
        phase = finished.phase
        steps += 0 if phase.scoring else phase.local_steps
        if phase.ends_stage:
            weights = training.algorithm.extract_model(finished.state.server.shared).weights[: problem.features]
            stage_ends.append((phase.round + 1, steps, objective.gap(weights.numpy())))
    rounds, taken, gaps = np.array(stage_ends[trial.settled :]).T
    return Curve(rounds, taken, gaps[None])


def repeat_trial(problem: Problem, trial: Trial, method: str, per_round: int, seeds: Sequence[int]) -> Curve:
    """The same trial with several seeds."""
    runs = [run_trial(problem, trial, method, per_round, seed) for seed in seeds]
    return runs[0]._replace(gaps=np.concatenate([run.gaps for run in runs]))


Cost = Literal["rounds", "steps"]


def fit_line(curve: Curve, cost: Cost) -> np.ndarray:
    """The power law of the mean gap: log gap = p[0] · log cost + p[1]. The gap is fitted because the cost is exact."""
    return np.polyfit(np.log(getattr(curve, cost)), np.log(curve.gaps.mean(0)), 1)


def mean_slope(curves: Sequence[Curve], cost: Cost) -> float:
    """How the cost grows with ε: the inverse of the mean slope over the cohorts."""
    return 1 / float(np.mean([fit_line(curve, cost)[0] for curve in curves]))


def separate_slopes(curves: Sequence[Curve], cost: Cost) -> tuple[float, ...]:
    """The slope of each cohort."""
    return tuple(mean_slope([curve], cost) for curve in curves)


def common_gap(curves: Sequence[Curve]) -> float:
    """A gap that every cohort reaches: the middle, on a log axis, of the range they have in common."""
    means = [curve.gaps.mean(0) for curve in curves]
    return float(np.sqrt(max(mean[-1] for mean in means) * min(mean[0] for mean in means)))


def costs_to_gap(curves: Sequence[Curve], cost: Cost) -> np.ndarray:
    """The cost of each cohort at the common gap."""
    rate, level = np.array([fit_line(curve, cost) for curve in curves]).T
    return np.asarray(np.exp((np.log(common_gap(curves)) - level) / rate))


def speed_up(curves: Sequence[Curve], cost: Cost) -> float:
    """The slope of log cost against log M at the common gap."""
    return float(np.polyfit(np.log(COHORTS), np.log(costs_to_gap(curves, cost)), 1)[0])


def bootstrap_interval(
    statistic: Callable[[Sequence[Curve]], float | np.ndarray], curves: Sequence[Curve]
) -> np.ndarray:
    """The 2.5 % and 97.5 % quantiles of a bootstrap that resamples the runs of each curve separately."""
    rng = keys.numpy_generator("theory", "bootstrap")
    again = (
        [curve._replace(gaps=rng.choice(curve.gaps, len(curve.gaps))) for curve in curves] for _ in range(RESAMPLES)
    )
    return np.asarray(np.quantile(np.array([statistic(drawn) for drawn in again]), [0.025, 0.975], axis=0))


def planned_curves(curves: Sequence[Curve], trial: Trial, cohorts: Sequence[int]) -> list[Curve]:
    """The same plans with a gap of exactly η_s/M: what the theorem gives on these stages, with their rounding.

    The cost of the first stages is an additive constant, which the slopes -1/2 and -1 leave out.
    """
    steps = trial.decay ** np.arange(trial.settled, trial.stages)[None]
    return [curve._replace(gaps=steps / size) for curve, size in zip(curves, cohorts, strict=True)]


class Findings(NamedTuple):
    """A curve per method and cohort, and one per method with fixed local steps."""

    main: dict[str, list[Curve]]
    fixed: dict[str, list[Curve]]


class Slope(NamedTuple):
    """A slope in the theorem, of the plan, and measured with its 95 % interval, and those of the single cohorts."""

    theorem: float
    plan: float
    measured: float
    low: float
    high: float
    per_cohort: tuple[float, ...] = ()


def measure_rates(problem: Problem, trial: Trial, seeds: Sequence[int]) -> Findings:
    """Run every method, cohort and seed."""
    fixed = replace(trial, growth="fixed")
    main = {name: [repeat_trial(problem, trial, name, size, seeds) for size in COHORTS] for name in METHODS}
    return Findings(main, {name: [repeat_trial(problem, fixed, name, CONTROL, seeds)] for name in METHODS})


def compare_slopes(findings: Findings, trial: Trial, method: str) -> dict[str, Slope]:
    """Every slope of one method beside the theorem's."""
    main, fixed = findings.main[method], findings.fixed[method]

    def compare(statistic: Callable[[Sequence[Curve]], float], curves: Sequence[Curve], theorem: float) -> Slope:
        plan = statistic(planned_curves(curves, trial, COHORTS if curves is main else (CONTROL,)))
        return Slope(theorem, plan, statistic(curves), *bootstrap_interval(statistic, curves).tolist())

    def to_gap(cost: Cost, curves: Sequence[Curve], theorem: float) -> Slope:
        return compare(partial(mean_slope, cost=cost), curves, theorem)._replace(
            per_cohort=separate_slopes(curves, cost)
        )

    return {
        "rounds to ε": to_gap("rounds", main, -0.5),
        "local steps to ε": to_gap("steps", main, -1),
        "rounds against M": compare(partial(speed_up, cost="rounds"), main, 0),
        "local steps against M": compare(partial(speed_up, cost="steps"), main, -1),
        "rounds to ε, I fixed": to_gap("rounds", fixed, -1),
    }


def markdown_table(findings: Findings, trial: Trial) -> Iterator[str]:
    """The slopes as a table."""
    yield "| method | slope of | theorem | this plan | measured [95 %] | M = 1, 2, 4, 8 alone |"
    yield "|---|---|---|---|---|---|"
    for name in METHODS:
        for what, slope in compare_slopes(findings, trial, name).items():
            per_cohort = ", ".join(f"{value:.2f}" for value in slope.per_cohort if len(slope.per_cohort) > 1)
            measured = f"{slope.measured:.2f} [{slope.low:.2f}, {slope.high:.2f}]"
            yield f"| {name} | {what} | {slope.theorem:g} | {slope.plan:.2f} | {measured} | {per_cohort} |"


def make_record(problem: Problem, trial: Trial, findings: Findings) -> dict[str, Any]:
    """Everything that the figure shows, with the settings and versions it came from."""
    packages = {"fedauc": VERSION, "numpy": np.__version__, "torch": torch.__version__}
    return {
        "problem": asdict(problem),
        "trial": asdict(trial),
        "cohorts": COHORTS,
        "cohort with I fixed": CONTROL,
        "seeds": len(findings.main[METHODS[0]][0].gaps),
        "versions": {"python": platform.python_version(), **packages},
        "slopes": {
            name: {
                what: round_values(**slope._asdict()) for what, slope in compare_slopes(findings, trial, name).items()
            }
            for name in METHODS
        },
        "curves": {
            kind: {name: [round_values(**curve._asdict()) for curve in curves] for name, curves in methods.items()}
            for kind, methods in findings._asdict().items()
        },
    }


def round_values(**values: Any) -> dict[str, Any]:
    """Values for JSON with five digits."""
    return {
        name: np.vectorize(lambda number: float(f"{number:.5g}"), otypes=[float])(value).tolist()
        for name, value in values.items()
    }


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write a record as JSON with one row of numbers per line."""
    text = json.dumps(record, indent=1, ensure_ascii=False)
    folded = re.sub(r"\[[^\[\]{}]*\]", lambda row: " ".join(row[0].split()), text)
    write_atomically(path, f"{folded}\n".encode())


def read_record(path: Path) -> tuple[Findings, Trial]:
    """Read what `write_record` wrote."""
    record = json.loads(path.read_text(encoding="utf-8"))
    curves = {
        kind: {
            name: [Curve(**{field: np.array(value) for field, value in stored.items()}) for stored in curves]
            for name, curves in methods.items()
        }
        for kind, methods in record["curves"].items()
    }
    return Findings(**curves), Trial(**record["trial"])


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
    findings = measure_rates(problem, trial, range(arguments.seeds))
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_record(make_record(problem, trial, findings), arguments.out / "theory.json")
    print("\n".join(markdown_table(findings, trial)))


if __name__ == "__main__":
    main()
