"""Read first: the records that travel and the abstractions that make them.

One round of any algorithm, on any engine (`training.py` holds the real loop):

    phase   = plan.phase(round)                               # when: stage, learning rate, local steps
    cohort  = participation.cohort(round)                     # who
    order   = algorithm.dispatch(setting, server, cohort, phase)
    visits  = engine.visit(order, cohort)                     # ---- client side, for each client:
        local = algorithm.begin(order, memory)
        repeat local_steps times: local, emitted = algorithm.step(network, order, local, batch)
        upload, memory = algorithm.finish(order, memory, local, emitted)
                                                              # `mean` averaged, `pool` kept per client
    server  = algorithm.merge(setting, server, visits.upload, cohort, phase)

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

BatchKind = Literal["classes", "rows"]
"""What a batch is: so many positives then so many negatives, or so many rows whatever their label."""

Score = Literal["identity", "sigmoid"]
"""How a network's raw output becomes the score an objective sees."""


# ---------------------------------------------------------------------------------------------------- static facts


class BatchSize(NamedTuple):
    """Active examples per local step: the paper's B1 positives and B2 negatives; a `rows` draw takes their sum."""

    positives: int
    negatives: int

    @property
    def total_rows(self) -> int:
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
    augment: str = "none"

    @cached_property
    def client_count(self) -> int:
        """The number of clients that hold data, N."""
        return int(np.count_nonzero(self.census.positives + self.census.negatives))


class Phase(NamedTuple):
    """What the plan says of one round. Both sides derive it from the configuration, so it never travels.

    The plan's `learning_rate` is a number; a compiling engine may hand its steps a tensor instead.
    `scoring` rounds compute and share scores without learning (the first pool of the pairwise methods).
    The scoring cycle that opens a stage counts among its rounds and cycles.
    """

    round: int
    cycle: int
    stage: int
    learning_rate: float | Tensor
    local_steps: int
    batch: BatchSize
    scoring: bool = False
    starts_stage: bool = False
    ends_cycle: bool = False
    ends_stage: bool = False
    learning_cycles: int = 0
    """Learning cycles begun so far, this one included."""


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


class Download(NamedTuple):
    """What goes to a client, nothing else: `shared` for all, `anchor` once per stage and client, `own` its own draw.

    As made by `dispatch`, the leaves of `own` are `[M, I, ...]`: one entry per client and local step. A client sees
    its own `[I, ...]`, and each step finds its slice in `batch.own`.
    """

    phase: Phase
    shared: Tree
    anchor: Tree = ()
    per_client: Tree = ()


class Upload(NamedTuple):
    """What comes back: `mean` is averaged over the cohort; `pool` is kept per client, so the leak shows in the type.

    `mean` is always a change, of the shape of `order.shared`: what a mechanism clips, quantises or adds noise to is the
    same for every algorithm. As returned by an engine it is the cohort's mean; `pool` has a leading entry per client.
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
    per_client: Tree = ()


class Visits(NamedTuple):
    """What an engine returns: the cohort's reduced upload, and its mean loss before the first step.

    The loss is telemetry of a simulation: an engine across machines may return None instead of asking for it.
    `cohort` is who came, where that is not who was due; the upload is then over those, and empty if nobody came.
    """

    upload: Upload
    loss: Tensor | None
    cohort: Cohort | None = None


# ------------------------------------------------------------------------------------------------- the abstractions


class ForwardPass(NamedTuple):
    """A forward pass: raw outputs `[..., B]` (or embeddings `[..., B, E]`), buffers after it, and the pullback.

    `pullback(cotangent)` maps a derivative with respect to `outputs` to one with respect to `weights`.
    """

    outputs: Tensor
    buffers: Tensor
    pullback: Callable[[Tensor], Tensor]


class Network(ABC):
    """How an algorithm sees a model: a function of flat vectors with a pullback. The engine decides how it runs."""

    @abstractmethod
    def forward_pass(self, model: Model, inputs: Tensor) -> ForwardPass:
        """Run the model in training mode and keep what the pullback needs."""


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """A loss of scores. `score` says how raw outputs become scores; `draw` says which batches it needs."""

    name: ClassVar[str]
    takes_embeddings: ClassVar[bool] = False
    """Whether it takes embeddings instead of scores."""

    score: Score = "identity"

    def __post_init__(self) -> None:
        if self.score not in ("identity", "sigmoid"):
            raise ValueError(f"score is {self.score!r}; use 'identity' or 'sigmoid'")

    @property
    def batch_kind(self) -> BatchKind:
        """Which batches the objective needs."""
        return "classes"

    def to_scores(self, raw: Tensor) -> Tensor:
        """Scores from raw outputs."""
        return raw if self.score == "identity" else torch.sigmoid(raw)

    def to_output_slopes(self, scores: Tensor, slopes: Tensor) -> Tensor:
        """Derivatives with respect to the raw outputs, from those with respect to the scores."""
        return slopes if self.score == "identity" else slopes * (scores * (1 - scores))


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

    def without_server_settings(self) -> Algorithm:
        """Itself, less what the server alone reads: runs that agree in this take the same steps."""
        return self

    @abstractmethod
    def init(self, setting: Setting, model: Model) -> Server:
        """The server before the first round."""

    @abstractmethod
    def dispatch(self, setting: Setting, server: Server, cohort: Cohort, phase: Phase) -> Download:
        """What the cohort is sent."""

    def initial_client_state(self, download: Download) -> Tree:
        """What a client remembers before its first visit; `()` for algorithms without client memory."""
        return ()

    @abstractmethod
    def begin(self, download: Download, client_state: Tree) -> Tree:
        """A client's local state before its first step."""

    @abstractmethod
    def step(self, network: Network, download: Download, local: Tree, batch: Batch) -> tuple[Tree, Tree]:
        """One local step: the new local state, and what it emits (the engine stacks it over steps)."""

    @abstractmethod
    def monitored_loss(self, network: Network, download: Download, local: Tree, batch: Batch) -> Tensor:
        """The loss `[...]` of a local state on a batch, non-negative; engines ask for it at the first step."""

    @abstractmethod
    def finish(self, download: Download, client_state: Tree, local: Tree, emitted: Tree) -> tuple[Upload, Tree]:
        """The upload, and what the client remembers until its next visit (`()`: nothing)."""

    @abstractmethod
    def merge(self, setting: Setting, server: Server, reduced: Upload, cohort: Cohort, phase: Phase) -> Server:
        """The server after the round; `reduced.mean` is `()` when nothing is to be averaged (scoring, nobody came)."""

    @abstractmethod
    def extract_model(self, shared: Tree) -> Model:
        """The model inside `shared`."""

    def stage_output(self, last: Tree, mean: Tree) -> Tree:
        """What an averaged stage hands on: the mean, save for what must stay the last (control variates)."""
        return mean

    def diagnostics(self, shared: Tree) -> dict[str, Tensor]:
        """Small numbers worth a column in the records (duals); empty for most."""
        return {}


class Engine(ABC):
    """Owns client data and client memory, and runs the client verbs for a cohort."""

    name: ClassVar[str]

    @abstractmethod
    def visit(self, download: Download, cohort: Cohort) -> Visits:
        """Run the cohort's local steps and average what comes back with the cohort's weights."""

    @abstractmethod
    def client_states(self) -> dict[int, Tree]:
        """Every client's memory, for a checkpoint."""

    @abstractmethod
    def restore_client_states(self, client_states: dict[int, Tree]) -> None:
        """Put memories back."""
