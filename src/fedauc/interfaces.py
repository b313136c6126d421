"""Read first: the records that travel and the abstractions that make them.

One round of any algorithm, on any engine (`training.py` holds the real loop):

    phase   = plan.phase(round)                               # when: stage, step size, local steps
    cohort  = participation.cohort(round)                     # who
    order   = algorithm.dispatch(setting, server, cohort, phase)
    visits  = engine.visit(order, cohort)                     # ---- client side
        local = algorithm.begin(order, memory)
        repeat local_steps times: local, emitted, value = algorithm.step(network, order, local, batch)
        upload, memory = algorithm.finish(order, memory, local, emitted)
    reduced = reduce(visits.upload, cohort)                   # `mean` averaged, `pool` kept per client
    server  = algorithm.merge(setting, server, reduced, cohort, phase)

Configuration is a frozen dataclass that validates itself; state is a NamedTuple of tensors. They never mix.

Shapes. A model is one flat vector `weights [d]` and one flat vector `buffers [b]` (BatchNorm statistics; b = 0 for most
models). The client verbs are written for any number of leading dimensions, so that an engine may run one client
(`weights [d]`, `inputs [B, ...]`) or a stacked cohort (`weights [M, d]`, `inputs [M, B, ...]`) through the same code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedauc.trees import Tree

Draw = Literal["classes", "rows"]
"""What a batch is: so many positives then so many negatives, or so many rows whatever their label."""

Score = Literal["identity", "sigmoid"]
"""How a network's raw output becomes the score an objective sees."""


# ---------------------------------------------------------------------------------------------------- static facts


class BatchSize(NamedTuple):
    """Active examples per local step: the paper's B1 positives and B2 negatives; a `rows` draw takes their sum."""

    positives: int
    negatives: int

    @property
    def total(self) -> int:
        """Rows per local step."""
        return self.positives + self.negatives


class Census(NamedTuple):
    """How many positives and negatives each client holds: int64 arrays `[N]`. All a server knows of the data."""

    positives: np.ndarray
    negatives: np.ndarray


@dataclass(frozen=True)
class Setting:
    """What stays fixed over a run and the server side may know."""

    seed: int
    cycle_length: int
    batch: BatchSize
    census: Census
    weighting: str

    @cached_property
    def clients(self) -> int:
        """The number of clients that hold data, N."""
        return int(np.count_nonzero(self.census.positives + self.census.negatives))


class Phase(NamedTuple):
    """What the plan says of one round. Both sides derive it from the configuration, so it never travels.

    `scoring` rounds compute and share scores without learning (the first pool of the pairwise methods).
    The scoring cycle that opens a stage counts among its rounds and cycles.
    """

    round: int
    cycle: int
    stage: int
    step_size: float
    local_steps: int
    batch: BatchSize
    scoring: bool = False
    starts_stage: bool = False
    ends_cycle: bool = False
    ends_stage: bool = False


# -------------------------------------------------------------------------------------------- the records that travel


class Cohort(NamedTuple):
    """Who takes part in a round, each client's share of the mean (sums to 1), and who was due but absent."""

    round: int
    clients: tuple[int, ...]
    weights: tuple[float, ...]
    absent: tuple[int, ...] = ()


class Model(NamedTuple):
    """A network's state as two flat vectors."""

    weights: Tensor
    buffers: Tensor


class Server(NamedTuple):
    """The server's state: `shared` goes to clients, `anchor` is `shared` at the stage's start, `private` stays."""

    shared: Tree
    anchor: Tree
    private: Tree = ()


class Order(NamedTuple):
    """What goes to a client, nothing else: `shared` for all, `anchor` once per stage and client, `own` its own draw.

    As made by `dispatch`, the leaves of `own` are `[M, I, ...]`: one entry per client and local step. A client sees
    its own `[I, ...]`, and each step finds its slice in `batch.own`.
    """

    phase: Phase
    shared: Tree
    anchor: Tree = ()
    own: Tree = ()


class Upload(NamedTuple):
    """What comes back: `mean` is averaged over the cohort; `pool` is kept per client, so the leak shows in the type.

    As made by `Engine.visit`, leaves have one leading entry per client; `reduce` takes it off `mean` only.
    """

    mean: Tree = ()
    pool: Tree = ()


class Batch(NamedTuple):
    """One local step's examples: a loss term is `sum(weights * loss)`, so weights hold 1/B, the weighting, and absence.

    In a `classes` draw the first `phase.batch.positives` rows are the positives. A class the client does not hold keeps
    its rows (filled from the other class) with weight zero.
    """

    inputs: Tensor
    labels: Tensor
    weights: Tensor
    own: Tree = ()


class Visits(NamedTuple):
    """What an engine returns for a cohort: the uploads, and each client's mean monitored value `[M]` (never sent)."""

    upload: Upload
    value: Tensor


# ------------------------------------------------------------------------------------------------- the abstractions


class Scored(NamedTuple):
    """A forward pass: raw outputs `[..., B]` (or embeddings `[..., B, E]`), buffers after it, and the pullback.

    `pullback(cotangent)` maps a derivative with respect to `outputs` to one with respect to `weights`.
    """

    outputs: Tensor
    buffers: Tensor
    pullback: Callable[[Tensor], Tensor]


class Network(ABC):
    """How an algorithm sees a model: a function of flat vectors with a pullback. The engine decides how it runs."""

    @abstractmethod
    def score(self, model: Model, inputs: Tensor) -> Scored:
        """Run the model in training mode and keep what the pullback needs."""


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """A loss of scores. `score` says how raw outputs become scores; `draw` says which batches it needs."""

    name: ClassVar[str]
    score: Score = "identity"

    def __post_init__(self) -> None:
        if self.score not in ("identity", "sigmoid"):
            raise ValueError(f"score is {self.score!r}; use 'identity' or 'sigmoid'")

    @property
    def draw(self) -> Draw:
        """Which batches the objective needs."""
        return "classes"

    def link(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and their derivative with respect to the raw outputs."""
        if self.score == "identity":
            return raw, torch.ones_like(raw)
        scores = torch.sigmoid(raw)
        return scores, scores * (1 - scores)


class PointObjective(Objective):
    """A loss of one example, `value(scores, labels)`: the baselines'."""

    @property
    def draw(self) -> Draw:
        """Rows whatever their label."""
        return "rows"

    @abstractmethod
    def value(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The loss of each example, non-negative, the shape of `scores`."""

    def slope(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The derivative of `value` with respect to `scores`; by autograd unless a subclass knows it."""
        return _derivative(lambda s: self.value(s, labels), scores)


class Active(NamedTuple):
    """A step's own scores by class, `[..., B1]` and `[..., B2]` (embeddings: one dimension more), and their weights."""

    positives: Tensor
    negatives: Tensor
    positive_weights: Tensor
    negative_weights: Tensor


class Passive(NamedTuple):
    """Scores of other clients from an earlier cycle, constants in every gradient: `[..., P1]` and `[..., P2]`."""

    positives: Tensor
    negatives: Tensor


class PairObjective(Objective):
    """A loss that couples active with passive scores."""

    @abstractmethod
    def couple(self, active: Active, passive: Passive) -> tuple[Tensor, Active]:
        """The monitored value `[...]`, non-negative, and the derivative with respect to the active scores."""


class GapObjective(PairObjective):
    """A surrogate of the gap t = h - h' between a positive's and a negative's score: give `value`, perhaps `slope`."""

    @abstractmethod
    def value(self, gap: Tensor) -> Tensor:
        """The surrogate psi(t), elementwise, non-negative."""

    def slope(self, gap: Tensor) -> Tensor:
        """psi'(t); by autograd unless a subclass knows it."""
        return _derivative(self.value, gap)

    def couple(self, active: Active, passive: Passive) -> tuple[Tensor, Active]:
        """G1 pairs active positives with passive negatives, G2 passive positives with active negatives (no 1/2)."""
        first = active.positives[..., :, None] - passive.negatives[..., None, :]
        second = passive.positives[..., None, :] - active.negatives[..., :, None]
        slopes = active._replace(
            positives=active.positive_weights * mean_last(self.slope(first)),
            negatives=-active.negative_weights * mean_last(self.slope(second)),
        )
        terms = (active.positive_weights * mean_last(self.value(first))).sum(-1)
        terms = terms + (active.negative_weights * mean_last(self.value(second))).sum(-1)
        return terms / 2, slopes


def mean_last(values: Tensor) -> Tensor:
    """Mean over the last dimension; zero when it is empty (a pool that lacks a class contributes nothing)."""
    return values.sum(-1) / max(values.shape[-1], 1)


def _derivative(function: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    """The derivative of an elementwise function, traceable by torch.func and torch.compile."""
    gradient: Tensor = torch.func.grad(lambda x: function(x).sum())(point)
    return gradient


@dataclass(frozen=True)
class Participation(ABC):
    """Who takes part in which round. Frozen parameters; `bind` meets the clients."""

    name: ClassVar[str]

    @abstractmethod
    def bind(self, clients: Roster, seed: int) -> Schedule:
        """Check the parameters against the clients and return the schedule."""


class Roster(NamedTuple):
    """What participation may know of the clients: how many rows each holds, and an optional group label of each."""

    sizes: np.ndarray
    groups: np.ndarray | None = None


class Schedule(ABC):
    """A bound participation: `cohort(round)` is a pure function, so a run resumes without replay."""

    cycle_length: int
    """Rounds per cycle: the paper's K."""

    groups: Sequence[np.ndarray]
    """The clients of each group, for per-group metrics; one group where the schedule has none."""

    @abstractmethod
    def cohort(self, round: int) -> Cohort:
        """The clients of a round, empty clients never among them."""


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """Six verbs: `begin, step, finish` run at the client, `init, dispatch, merge` at the server.

    `step` is pure and traceable: no randomness, no data-dependent control flow, any leading dimensions.
    """

    name: ClassVar[str]
    scoring_pass: ClassVar[bool] = False
    """Whether the first stage, and any that starts from an averaged model, opens with a cycle of scoring rounds."""

    objective: Objective
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay is {self.weight_decay}; it must be at least 0")

    @abstractmethod
    def init(self, setting: Setting, model: Model) -> Server:
        """The server before the first round."""

    @abstractmethod
    def dispatch(self, setting: Setting, server: Server, cohort: Cohort, phase: Phase) -> Order:
        """What the cohort is sent."""

    def blank(self, order: Order) -> Tree:
        """What a client remembers before its first visit; `()` for algorithms without client memory."""
        return ()

    @abstractmethod
    def begin(self, order: Order, memory: Tree) -> Tree:
        """A client's local state before its first step."""

    @abstractmethod
    def step(self, network: Network, order: Order, local: Tree, batch: Batch) -> tuple[Tree, Tree, Tensor]:
        """One local step: the new local state, what it emits (the engine stacks it over steps), the monitored value."""

    @abstractmethod
    def finish(self, order: Order, memory: Tree, local: Tree, emitted: Tree) -> tuple[Upload, Tree]:
        """The upload, and what the client remembers until its next visit (`()`: nothing)."""

    @abstractmethod
    def merge(self, setting: Setting, server: Server, reduced: Upload, cohort: Cohort, phase: Phase) -> Server:
        """The server after the round; `reduced.mean` is `()` when nothing is to be averaged (scoring, nobody came)."""

    @abstractmethod
    def model(self, shared: Tree) -> Model:
        """The model inside `shared`."""

    def settle(self, last: Tree, mean: Tree) -> Tree:
        """What an averaged stage hands on: the mean, save for what must stay the last (control variates)."""
        return mean

    def vitals(self, shared: Tree) -> dict[str, float]:
        """Small numbers worth a column in the records (duals); empty for most."""
        return {}


class Engine(ABC):
    """Owns client data and client memory, and runs the client verbs for a cohort."""

    @abstractmethod
    def visit(self, order: Order, cohort: Cohort) -> Visits:
        """Run the cohort's local steps."""

    @abstractmethod
    def memories(self) -> dict[int, Tree]:
        """Every client's memory, for a checkpoint."""

    @abstractmethod
    def restore(self, memories: dict[int, Tree]) -> None:
        """Put memories back."""
