"""The K in the theorems' K/√ε, measured: how many rounds a given gap takes with more groups in a cycle.

    python -m paper.theory_groups                           # paper/records/theory-groups.json and its slopes
    python -m paper.theory_groups --figure docs/figures/theory-groups.png       # the figure, drawn from the record

Both theorems bound the drift within a cycle by a multiple of (ηKI)². It stays below a gap ε if visits have I ∝ √ε/(ηK)
local steps, so that as many local steps in all take K times the rounds. Here the learning rates and the number of local
steps are the same for every K, and only the length of visits differs: longer ones save rounds and enlarge the gap. The
rounds for a gap ε are read off a power law through two lengths. No plan decides how they depend on K.

The class centres of the K groups lie evenly on a circle, so that the objective and the differences between groups are
the same for every K of at least 3. In the order `circle`, neighbours are alike, as hours of a day are, and the drift of
half a cycle adds up. In the order `shuffled`, the same groups come in an order that is drawn for every seed.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedauc import keys
from fedauc.data.clients import Clients
from fedauc.experiments.assembly import assemble_training
from fedauc.files import write_atomically
from fedauc.models.linear import Linear
from fedauc.reports.curves import COLOURS
from fedauc.version import VERSION
from paper.theory import METHODS, RESAMPLES, Quadratic, Trial, round_values, solve_rows, write_record

GROUPS = (3, 4, 6, 8, 12, 24)
ORDERS = ("circle", "shuffled")

PLAN = Trial(learning_rate=1 / 30, stages=3, settled=2, travel=3.2)
"""The stages of every run: learning rates 1/30, 1/120 and 1/480 with 96, 384 and 1536 local steps."""

SHORT = {"circle": dict.fromkeys(GROUPS, 24), "shuffled": {3: 12, 4: 12, 6: 24, 8: 24, 12: 24, 24: 48}}
"""By order and K, the local steps K·I₀ of a cycle in the first stage with the shorter of two visits; the other visits
are twice as long. Pilots showed that the gap ε is between the two or close to them."""


@dataclass(frozen=True)
class Circle:
    """K groups whose class centres lie on a circle, and the clients of a group, which have rows of the same kind."""

    groups: int
    order: str = "circle"
    seed: int = 0
    """The seed of the rows, and of the order of groups where that is `shuffled`."""
    per_group: int = 4
    rows: int = 1 << 16
    """Rows of each class in all groups together, or a few less if the clients could not have the same number."""
    features: int = 4
    noise: float = 0.7
    radius: float = 0.3

    def draw_rows(self) -> np.ndarray:
        """Rows `[class, group, row, feature]`, positives first; the classes are moved in opposite directions."""
        rng = keys.numpy_generator(self.seed, "theory", "circle", self.groups)
        angles = 2 * np.pi * np.arange(self.groups) / self.groups
        if self.order == "shuffled":
            angles = rng.permutation(angles)
        offsets = self.radius * np.cos(angles[:, None] - np.pi / 2 * np.arange(self.features))
        means = 0.5 / np.sqrt(self.features) + offsets
        rows = self.rows // (self.groups * self.per_group) * self.per_group
        noise = rng.normal(0, self.noise, (2, self.groups, rows, self.features))
        return np.asarray(np.stack([means, -means])[:, :, None] + noise)

    @functools.cached_property
    def clients(self) -> Clients:
        """The rows of every group, divided between its clients."""
        rows = self.draw_rows()
        names = np.arange(self.groups * self.per_group)
        owner = names.repeat(rows.shape[2] // self.per_group)
        labels = np.array([1, 0]).repeat(len(owner))
        inputs = rows.reshape(-1, self.features)
        return Clients.from_assignment(inputs, labels, np.tile(owner, 2), names, names // self.per_group)

    @functools.cached_property
    def objective(self) -> Quadratic:
        """The objective over all rows."""
        return solve_rows(self.draw_rows())


def run_gap(problem: Circle, method: str, cycle_steps: int) -> float:
    """The gap after the last stage, with so many local steps K·I₀ in a cycle of the first stage."""
    # `Trial` divides by √M, which is 2 for the four clients of every group.
    local_steps = cycle_steps // problem.groups * round(problem.per_group**0.5)
    recipe = replace(PLAN, local_steps=local_steps).recipe(method, problem.groups, problem.per_group, problem.seed)
    network = Linear().build((problem.features,), problem.seed)
    training, _, state = assemble_training(recipe, network, problem.clients)
    for finished in training.rounds(state):
        state = finished.state
    weights = training.algorithm.extract_model(state.server.shared).weights[: problem.features]
    return problem.objective.gap(weights.numpy())


class Gaps(NamedTuple):
    """Rounds `[groups, 2]` with long and with short visits, and the gaps `[seeds, groups, 2]` after them.

    Rounds in which the pairwise method only computes scores are left out: they are K in every stage.
    """

    rounds: np.ndarray
    gaps: np.ndarray


def count_rounds(order: str) -> np.ndarray:
    """Rounds `[groups, 2]` with long and with short visits: stages of 1, 2 and 4 times as many cycles of K rounds."""
    cycles = sum(2**stage for stage in range(PLAN.stages)) * PLAN.travel / PLAN.learning_rate
    return np.array([[cycles * groups / (factor * SHORT[order][groups]) for factor in (2, 1)] for groups in GROUPS])


def measure_groups(seeds: Sequence[int]) -> dict[str, dict[str, Gaps]]:
    """Run every order, number of groups, seed, method and length of visits."""
    gaps = {(method, order): np.zeros((len(seeds), len(GROUPS), 2)) for method in METHODS for order in ORDERS}
    for order in ORDERS:
        for position, groups in enumerate(GROUPS):
            for row, seed in enumerate(seeds):
                problem, short = Circle(groups, order, seed), SHORT[order][groups]
                for method in METHODS:
                    measured = [run_gap(problem, method, steps) for steps in (2 * short, short)]
                    gaps[method, order][row, position] = measured
    return {method: {order: Gaps(count_rounds(order), gaps[method, order]) for order in ORDERS} for method in METHODS}


def common_gap(measured: Gaps) -> float:
    """A gap ε between those of long and of short visits: the middle, on a log axis, of what all K have in common."""
    long, short = measured.gaps.mean(0).T
    return float(np.sqrt(long.min() * short.max()))


def rounds_to_gap(measured: Gaps, gap: float) -> np.ndarray:
    """The rounds `[groups]` for a gap: a power law through the middle of both lengths of visits, on log axes.

    Its exponent, by which shorter visits reduce the gap, is the same for every K: the mean over K, since a single K has
    two noisy means only.
    """
    rounds, gaps = np.log(measured.rounds), np.log(measured.gaps.mean(0))
    power = np.mean(np.diff(gaps) / np.diff(rounds))
    return np.asarray(np.exp(rounds.mean(1) + (np.log(gap) - gaps.mean(1)) / power))


def fit_exponent(rounds: np.ndarray) -> float:
    """The exponent p of rounds ∝ K^p."""
    return float(np.polyfit(np.log(GROUPS), np.log(rounds), 1)[0])


class Growth(NamedTuple):
    """The rounds for the gap ε by K, and the exponent of K, with 95 % intervals."""

    gap: float
    rounds: np.ndarray
    rounds_interval: np.ndarray
    exponent: float
    exponent_interval: np.ndarray


def measure_growth(measured: Gaps) -> Growth:
    """The growth at the common gap. The bootstrap resamples the seeds of every K separately."""
    rng, gap = keys.numpy_generator("theory", "groups", "bootstrap"), common_gap(measured)
    seeds, resampled = len(measured.gaps), []
    for _ in range(RESAMPLES):
        chosen = rng.integers(seeds, size=(seeds, len(GROUPS)))
        resampled.append(rounds_to_gap(measured._replace(gaps=measured.gaps[chosen, np.arange(len(GROUPS))]), gap))
    rounds, quantiles = rounds_to_gap(measured, gap), [0.025, 0.975]
    return Growth(
        gap,
        rounds,
        np.quantile(resampled, quantiles, axis=0),
        fit_exponent(rounds),
        np.quantile([fit_exponent(drawn) for drawn in resampled], quantiles),
    )


def markdown_table(findings: Mapping[str, Mapping[str, Gaps]]) -> Iterator[str]:
    """The rounds for the common gap by K, and their exponent."""
    counts = " | ".join(f"K = {groups}" for groups in GROUPS)
    yield f"| method | order of groups | ε | {counts} | exponent of K [95 %] |"
    yield "|---" * (len(GROUPS) + 4) + "|"
    for method, by_order in findings.items():
        for order, measured in by_order.items():
            growth = measure_growth(measured)
            low, high = growth.exponent_interval
            rounds = " | ".join(f"{count:.0f}" for count in growth.rounds)
            exponent = f"{growth.exponent:.2f} [{low:.2f}, {high:.2f}]"
            yield f"| {method} | {order} | {growth.gap:.1e} | {rounds} | {exponent} |"


def make_record(findings: Mapping[str, Mapping[str, Gaps]]) -> dict[str, Any]:
    """The gaps, with the settings and versions they came from, and the exponents."""
    problem = {
        name: value for name, value in asdict(Circle(GROUPS[0])).items() if name not in ("groups", "order", "seed")
    }
    growths = {
        method: {order: measure_growth(measured) for order, measured in by_order.items()}
        for method, by_order in findings.items()
    }
    return {
        "problem": problem,
        "plan": asdict(PLAN),
        "groups": GROUPS,
        "cycle steps of short visits": SHORT,
        "versions": {
            "python": platform.python_version(),
            "fedauc": VERSION,
            "numpy": np.__version__,
            "torch": torch.__version__,
        },
        "exponents": {
            method: {order: round_values(**growth._asdict()) for order, growth in by_order.items()}
            for method, by_order in growths.items()
        },
        "gaps": {
            method: {order: round_values(**measured._asdict()) for order, measured in by_order.items()}
            for method, by_order in findings.items()
        },
    }


def read_gaps(path: Path) -> dict[str, dict[str, Gaps]]:
    """Read the gaps of a record."""
    stored = json.loads(path.read_text(encoding="utf-8"))["gaps"]
    return {
        method: {
            order: Gaps(*(np.array(values[field]) for field in Gaps._fields)) for order, values in by_order.items()
        }
        for method, by_order in stored.items()
    }


def plot_growth(findings: Mapping[str, Mapping[str, Gaps]]) -> Any:
    """The rounds for the common gap against K: a panel per method."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    groups = np.array(GROUPS, dtype=float)
    for axis, (method, by_order) in zip(figure.subplots(1, len(findings), sharey=True), findings.items(), strict=True):
        for colour, marker, (order, measured) in zip(COLOURS, "os", by_order.items(), strict=False):
            growth = measure_growth(measured)
            bars = np.abs(growth.rounds_interval - growth.rounds)
            axis.errorbar(groups, growth.rounds, yerr=bars, color=colour, marker=marker, markersize=4, linestyle="")
            low, high = growth.exponent_interval
            label = f"{order}: slope {growth.exponent:.2f} [{low:.2f}, {high:.2f}], ε = {growth.gap:.1e}"
            _plot_slope(axis, growth, growth.exponent, label=label, color=colour, linewidth=1.1)
            _plot_slope(axis, growth, 1.0, color="black", linestyle="--", linewidth=0.9, alpha=0.4)
        axis.plot([], [], color="black", linestyle="--", linewidth=0.9, alpha=0.4, label="the theorem's slope 1")
        axis.set(xscale="log", yscale="log", xlabel="K, groups in a cycle", title=method)
        axis.set_xticks(GROUPS, labels=[str(count) for count in GROUPS])
        axis.set_xticks([], minor=True)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8, loc="upper left")
    figure.axes[0].set_ylabel("rounds for the gap ε")
    return figure


def _plot_slope(axis: Any, growth: Growth, slope: float, **look: Any) -> None:
    """A power law of K through the centre of the measured rounds."""
    shape = np.array(GROUPS, dtype=float) ** slope
    axis.plot(GROUPS, shape * np.exp(np.log(growth.rounds / shape).mean()), **look)


def main() -> None:
    """Measure and write the record, or draw the figure of one; print the exponents."""
    parser = argparse.ArgumentParser(description="The rounds that a gap takes with more groups in a cycle.")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("paper/records/theory-groups.json"))
    parser.add_argument(
        "--figure", type=Path, help="Draw the figure of the record at --out into this file; nothing runs."
    )
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error(f"--seeds is {arguments.seeds}; an interval needs at least 2")
    if arguments.figure:
        plot_growth(read_gaps(arguments.out)).savefig(buffer := io.BytesIO(), format="png", dpi=100)
        write_atomically(arguments.figure, buffer.getvalue())
    else:
        torch.set_num_threads(1)
        write_record(make_record(measure_groups(range(arguments.seeds))), arguments.out)
    print("\n".join(markdown_table(read_gaps(arguments.out))))


if __name__ == "__main__":
    main()
