"""What a seed decides: the federation, its policy, and the faults that happen to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedauc.experiments.recipe import Recipe
from fedauc.federation.agreement import FederationAgreement, ServerPolicy, SiteEntry
from fedauc.keys import numpy_generator
from fedauc.participation.cyclic import Cyclic
from fedauc.server_optimizers.momentum import Momentum
from fedauc.stages import Geometric
from fedauc.transforms.clip import Clip
from fedauc.transforms.quantize import Quantize

FEATURES = 3

SERVER = "server"

DEADLINE = 10.0
"""Virtual seconds that a round waits for its sites."""

CALM = 150.0
"""Virtual seconds after which nothing goes wrong any more, and everything that was broken works again."""

METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("cycp-fedavg", {}),
    ("cycp-fedavg", {"transforms": (Clip(norm=0.05), Quantize()), "server_optimizer": Momentum()}),
    ("cycp-minimax", {"prox": 0.5, "stages": Geometric(initial=1)}),
    ("cycp-minimax", {"stage_output": "round_mean"}),
    ("cycp-pairwise", {}),
    ("cycp-pairwise", {"stages": Geometric(initial=1)}),
    ("cycp-average-precision", {}),
    ("a-scaffold", {}),
    ("scaffold", {}),
    ("codasca", {}),
    ("focus", {}),
)
"""No state, error feedback and a server's state, an anchor, a stage's average, a pool, and client states."""

STEP_FAULTS = ("kill process", "lose power", "kill worker", "fill disk")
"""Faults that happen at an operation of a machine: a file operation, a message, or a wait."""

MOMENT_FAULTS = ("lose state", "partition", "skew clock")
"""Faults that begin at a moment."""

MESSAGE_FAULTS = (
    *("lose request", "lose reply", "delay request", "delay reply", "repeat request", "report error", "refuse to send"),
)
"""Faults of a message, which is known by its number."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong once. `number` counts operations of the machine, or messages; `seconds` lasts it."""

    kind: str
    machine: str = ""
    number: int = 0
    moment: float = 0.0
    seconds: float = 0.0

    def describe(self) -> str:
        """The fault in words."""
        if self.kind in MESSAGE_FAULTS:
            return f"{self.kind} of message {self.number} ({self.seconds:.1f} s)"
        if self.kind in MOMENT_FAULTS:
            return f"{self.kind} of {self.machine} at {self.moment:.1f} s for {self.seconds:.1f} s"
        return f"{self.kind} at operation {self.number} of {self.machine}, for {self.seconds:.1f} s"


class Scenario(NamedTuple):
    """A federation and its faults. `counts` are the rows of each class per site."""

    seed: int
    agreement: FederationAgreement
    counts: tuple[tuple[int, int], ...]
    faults: tuple[Fault, ...]
    faults_from_start: bool
    delivers_models: bool
    has_hours: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sites."""
        return tuple(site.name for site in self.agreement.sites)

    def describe(self) -> str:
        """The federation in one line."""
        recipe, policy = self.agreement.recipe, self.agreement.policy
        groups = [site.group for site in self.agreement.sites]
        return (
            f"{recipe.method}, {recipe.cycles} cycles, groups {' '.join(groups)}, quorum {policy.quorum}, patience "
            f"{policy.patience}, {policy.max_attempts} attempts, evaluation {policy.evaluation}"
        )


def draw_scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    generator = numpy_generator(seed, "scenario")
    group_sizes = [int(size) for size in generator.integers(1, 4, size=int(generator.integers(1, 4)))]
    if generator.random() < 0.1:
        group_sizes = [int(generator.integers(5, 8))]
    groups = [f"g{number}" for number, size in enumerate(group_sizes) for _ in range(size)]
    counts = [tuple(generator.integers(1, 6, size=2).tolist()) for _ in groups]
    if len(groups) > 2 and generator.random() < 0.3:
        # A site without positives, in a federation whose groups have others.
        counts[int(generator.integers(0, len(groups)))] = (0, int(generator.integers(1, 5)))
    delivers_models = bool(generator.random() < 0.06)
    if delivers_models:
        # Enough for a threshold at every site.
        counts = [(6, 8)] * len(groups)
    method, settings = METHODS[int(generator.integers(0, len(METHODS)))]
    order: Any = "reshuffled" if generator.random() < 0.3 else "fixed"
    sizes = {"local_steps": int(generator.integers(1, 3)), "positives": 2, "negatives": 3}
    numbers = {"cycles": int(generator.integers(2, 4)), "seed": int(generator.integers(0, 1000)), "dtype": "float64"}
    recipe = Recipe.of(method, **{**sizes, **numbers, "participation": Cyclic(order=order), **settings})
    policy = ServerPolicy(
        deadline=DEADLINE,
        registration_deadline=DEADLINE,
        poll_interval=0.5,
        quorum=int(generator.integers(1, 3)),
        patience=int(generator.integers(1, 4)),
        max_attempts=int(generator.integers(1, 4)),
        evaluation="histograms" if generator.random() < 0.5 else "none",
        evaluate_every=int(generator.integers(1, 3)),
        on_site_failure="continue" if generator.random() < 0.8 else "stop",
    )
    sites = tuple(SiteEntry(f"site-{number}", group, f"key-{number}") for number, group in enumerate(groups))
    has_hours = bool(generator.random() < 0.3)
    return Scenario(
        seed,
        FederationAgreement(recipe=recipe, sites=sites, policy=policy),
        tuple((int(positives), int(negatives)) for positives, negatives in counts),
        draw_faults(generator, [site.name for site in sites], has_hours),
        faults_from_start=bool(generator.random() < 0.2),
        delivers_models=delivers_models,
        has_hours=has_hours,
    )


def draw_faults(generator: np.random.Generator, sites: list[str], has_hours: bool) -> tuple[Fault, ...]:
    """Faults of all kinds: from none to about twenty, over the operations, messages and seconds of a short run."""
    faults, messages = list[Fault](), 20 * len(sites)

    def draw_seconds() -> float:
        """Short or beyond a deadline."""
        return float(generator.uniform(0.0, 3.0) if generator.random() < 0.6 else generator.uniform(3.0, 40.0))

    for _ in range(int(generator.integers(0, 5))):
        kind = "kill process" if generator.random() < 0.5 else "lose power"
        faults.append(Fault(kind, SERVER, int(generator.integers(1, 500)), seconds=draw_seconds()))
    for _ in range(int(generator.integers(0, 7))):
        site, kind = str(generator.choice(sites)), str(generator.choice(("kill process", "lose power", "kill worker")))
        faults.append(Fault(kind, site, int(generator.integers(1, 160)), seconds=draw_seconds()))
    if generator.random() < 0.3:
        machine = str(generator.choice((SERVER, *sites)))
        faults.append(Fault("fill disk", machine, int(generator.integers(1, 200)), seconds=draw_seconds()))
    if generator.random() < 0.5:
        for number in generator.integers(0, messages, size=int(generator.integers(1, 13))).tolist():
            faults.append(Fault(str(generator.choice(MESSAGE_FAULTS)), number=number, seconds=draw_seconds()))
    for kind, chance in (("lose state", 0.15), ("partition", 0.4), ("skew clock", 0.5 if has_hours else 0.0)):
        while generator.random() < chance:
            moment = float(generator.uniform(0.0, 40.0))
            faults.append(Fault(kind, str(generator.choice(sites)), moment=moment, seconds=draw_seconds()))
    return tuple(faults)
