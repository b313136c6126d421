"""Read this first: the records that travel between server and clients, and the abstractions that produce them.

One round of any algorithm, on any engine (`training.py` holds the real loop):

    phase    = plan.phase(round)                              # when: stage, learning rate, local steps
    cohort   = schedule.cohort(round)                         # who
    download = algorithm.dispatch(setting, server, cohort, phase)
    visits   = engine.visit(download, cohort)                 # ---- client side, for each client:
        local = algorithm.begin(download, client_state)
        repeat local_steps times: local, emitted = algorithm.step(network, download, local, batch)
        upload, client_state = algorithm.finish(download, client_state, local, emitted)
        upload, client_state = transform.client(upload, client_state, key, announced)    # clip, quantize, ...
                                                              # ---- server side again:
    uploads  = transform.decode(uploads)                      # `pool` stays per client, `mean` is averaged:
    mean     = mean_rule.combine(uploads, weights)            # weighted mean, median, ...
    mean     = transform.server(mean, transform_state, server_round)                     # add noise, ...
    mean     = server_optimizer.update(mean)                  # plain, momentum, Adam, ...
    server   = algorithm.merge(setting, server, mean, cohort, phase)

The engine owns the client side and the mean; `training.py` does the rest.

A configuration is a frozen dataclass that validates itself; state is a NamedTuple of tensors. The two never mix.

Shapes. A model is one flat vector `weights [d]` and one flat vector `buffers [b]` (BatchNorm statistics; b = 0 for most
models). The client methods are written for any number of leading dimensions, so that an engine may run one client
(`weights [d]`, `inputs [B, ...]`) or a stacked cohort (`weights [M, d]`, `inputs [M, B, ...]`) through the same code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np
import torch

from fedauc.class_totals import ClassTotalsEstimate
from fedauc.fields import check_fields, option
from fedauc.trees import Tree, find_only_node, replace_only_node

if TYPE_CHECKING:
    from torch import Tensor

    from fedauc.random_tensors import NoiseSource

BatchKind = Literal["classes", "rows"]
"""What a batch holds: a number of positives and then of negatives, or a number of rows of any label."""

Score = Literal["identity", "sigmoid"]
"""How a raw output of the network becomes the score that an objective sees."""


class BatchSize(NamedTuple):
    """Examples per local step: the paper's B1 positives and B2 negatives; a batch of `rows` takes their sum."""

    positives: int
    negatives: int

    @property
    def total_rows(self) -> int:
        """Rows per local step."""
        return self.positives + self.negatives


class Census(NamedTuple):
    """How many positives and negatives each client holds, int64 `[N]`. The server knows nothing else of the data."""

    positives: np.ndarray
    negatives: np.ndarray


@dataclass(frozen=True)
class Setting:
    """What stays fixed during a run and is known to the server."""

    seed: int
    cycle_length: int
    batch: BatchSize
    census: Census
    weighting: str
    augment: str = "none"
    totals: ClassTotalsEstimate | None = None
    """What clients may know of all clients' class counts in a private run; None: what the census says."""

    @cached_property
    def client_count(self) -> int:
        """The number of clients that hold data, N."""
        return int(np.count_nonzero(self.census.positives + self.census.negatives))


class Phase(NamedTuple):
    """What the plan says about one round. Server and clients derive it from the configuration, so it is never sent.

    The plan's `learning_rate` is a number; a compiling engine may pass a tensor to its steps instead.
    Rounds with `scoring` compute and share scores without learning (they fill the first pool of the pairwise methods).
    The scoring cycle at the start of a stage counts among the rounds and cycles of that stage.
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
    """The number of learning cycles that have begun, including this one."""


# -------------------------------------------------------------------------------------------- records of a round


class Cohort(NamedTuple):
    """The clients of a round, their weights in the mean, and the clients that were due but absent.

    Weights sum to 1, unless the denominator is fixed, as differential privacy needs it: then each weight is one over
    `expected_size`, the number of clients that are expected, whoever comes.
    """

    round: int
    clients: tuple[int, ...]
    weights: tuple[float, ...]
    absent: tuple[int, ...] = ()
    expected_size: float | None = None

    @property
    def divisor(self) -> float:
        """The number of clients by which a sum of uploads was divided to give their mean."""
        return len(self.clients) if self.expected_size is None else self.expected_size

    def fix_denominator(self) -> Cohort:
        """The cohort with weights that do not depend on who of the clients that are due has come."""
        size = self.expected_size or float(len(self.clients) + len(self.absent))
        return self._replace(weights=(1 / size,) * len(self.clients), expected_size=size) if size else self


class Model(NamedTuple):
    """The state of a network as two flat vectors."""

    weights: Tensor
    buffers: Tensor


class Server(NamedTuple):
    """The server's state: `shared` is sent to clients, `anchor` is `shared` at the stage's start, `private` stays."""

    shared: Tree
    anchor: Tree
    private: Tree = ()


class Download(NamedTuple):
    """Everything that a client is sent: `shared` for all, `anchor` once per stage, `per_client` for it alone.

    As returned by `dispatch`, the leaves of `per_client` are `[M, I, ...]`: one entry per client and local step. A
    client receives its part `[I, ...]`, and each local step finds its slice in `batch.per_client`. `announced` is what
    transforms at the server tell those at the clients, such as a clipping norm.
    """

    phase: Phase
    shared: Tree
    anchor: Tree = ()
    per_client: Tree = ()
    announced: Tree = ()


class Upload(NamedTuple):
    """What a client returns: `mean` is averaged over the cohort, while `pool` stays per client and so reveals more.

    `mean` always holds changes, in the shape of `download.shared`, so that clipping, quantisation and noise work in the
    same way for every algorithm. As returned by an engine it is the mean of the cohort, and the leaves of `pool` have a
    leading dimension of clients. In a scoring round `mean` is `()`.
    """

    mean: Tree = ()
    pool: Tree = ()


class ServerRound(NamedTuple):
    """What a transform knows at the server: whose uploads the mean holds, when, its noise, and the shared state."""

    cohort: Cohort
    phase: Phase
    noise: NoiseSource
    shared: Tree = ()


class ScoreHistogram(NamedTuple):
    """How scores are distributed: masses `[..., 2, bins]` of positives and of negatives at equally spaced scores.

    In the server's state a class has mass 1 in all, or 0 while nothing is known of it; in an upload it has the weight
    of the client in the loss. `ends` `[..., 2]` are the scores of the first and the last bin.
    """

    masses: Tensor
    ends: Tensor


class UploadSize(NamedTuple):
    """How many numbers, and how many bytes, the clients of a round uploaded in all."""

    numbers: int
    bytes: int


class Batch(NamedTuple):
    """The examples of one local step. A loss term is `sum(weights * loss)`: weights include 1/B and the weighting.

    In a batch of `classes` the first `phase.batch.positives` rows are the positives; several classes come in their
    order. A class that the client does not hold keeps its rows, which are of other classes and have weight zero.
    For an algorithm with `needs_places`, `places` `[..., B]` numbers each row among the rows of its client from 0,
    positives first, so that a client state can hold a value per row; for others it is `()`. For an algorithm with
    `needs_keys`, `key` `[...]` is the key (see `random_tensors.py`) of the randomness in this step.
    """

    inputs: Tensor
    labels: Tensor
    weights: Tensor
    per_client: Tree = ()
    places: Tree = ()
    key: Tree = ()


class Visits(NamedTuple):
    """What an engine returns: the averaged upload of the cohort, and its mean loss before the first step.

    The loss is for the records of a simulation: an engine across machines may return None instead of asking for it.
    `cohort` is set when other clients came than were due; the upload is then theirs, and empty if nobody came.
    `size` is what travelled, where transforms have changed it; otherwise the upload itself shows it.
    """

    upload: Upload
    loss: Tensor | None
    cohort: Cohort | None = None
    size: UploadSize | None = None


class ForwardPass(NamedTuple):
    """A forward pass: raw outputs `[..., B]` (or embeddings `[..., B, E]`), updated buffers, and the pullback.

    `pullback(cotangent)` maps a derivative with respect to `outputs` to one with respect to `weights`.
    """

    outputs: Tensor
    buffers: Tensor
    pullback: Callable[[Tensor], Tensor]


class Network(ABC):
    """What an algorithm sees of a model: a function of flat vectors with a pullback. The engine decides how it runs."""

    @abstractmethod
    def forward_pass(self, model: Model, inputs: Tensor) -> ForwardPass:
        """Run the model in training mode, and keep what the pullback needs."""


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """A loss of scores. `score` says how raw outputs become scores, and `batch_kind` which batches the loss needs."""

    name: ClassVar[str]
    takes_embeddings: ClassVar[bool] = False
    takes_classes: ClassVar[bool] = False
    """Whether the loss takes embeddings instead of scores, and whether it takes a score for each class of several."""

    score: Score = option("identity", "How a raw output becomes a score.")

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def batch_kind(self) -> BatchKind:
        """Which batches the loss needs."""
        return "classes"

    def to_scores(self, outputs: Tensor) -> Tensor:
        """The scores of raw outputs."""
        return outputs if self.score == "identity" else torch.sigmoid(outputs)

    def to_ranking(self, outputs: Tensor) -> Tensor:
        """What rows are ranked by when a model is used: the raw outputs, as AUC is the same under a monotone link."""
        return outputs

    def to_output_slopes(self, scores: Tensor, slopes: Tensor) -> Tensor:
        """Derivatives with respect to the raw outputs, given those with respect to the scores."""
        return slopes if self.score == "identity" else slopes * (scores * (1 - scores))


@dataclass(frozen=True)
class Participation(ABC):
    """Who takes part in which round: frozen parameters, from which `bind` makes a schedule for given clients."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def bind(self, clients: Roster, seed: int) -> Schedule:
        """Check the parameters against the clients and return the schedule."""


class Roster(NamedTuple):
    """What a participation knows about the clients: the number of rows of each, and optionally its group label.

    `columns` holds what else is known of them, such as a time zone or a region: arrays `[N]` by name.
    """

    sizes: np.ndarray
    groups: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] = MappingProxyType({})


class Schedule(ABC):
    """A participation bound to clients. `cohort(round)` is a pure function, so that a run resumes without replay."""

    cycle_length: int
    """The number of rounds per cycle, K in the paper."""

    groups: Sequence[np.ndarray]
    """The clients of each group, for metrics per group; a schedule without groups has a single one."""

    @abstractmethod
    def cohort(self, round: int) -> Cohort:
        """The clients of a round; clients without data are never among them."""


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """Six methods: `begin`, `step` and `finish` run at the client, `init`, `dispatch` and `merge` at the server.

    `step` is pure and traceable: it uses no randomness but that of `batch.key` and no data-dependent control flow, and
    it accepts any leading dimensions.
    """

    name: ClassVar[str]
    scoring_pass: ClassVar[bool] = False
    """Whether the first stage, and every stage that starts from an averaged model, begins with a scoring cycle."""

    needs_places: ClassVar[bool] = False
    needs_keys: ClassVar[bool] = False
    """Whether local steps use `batch.places`, and whether they use `batch.key`."""

    uploads_gradients_only: ClassVar[bool] = False
    """Whether rows enter the client's states and uploads through gradients alone (see `wrappers/example_dp.py`)."""

    has_personal_models: ClassVar[bool] = False
    """Whether clients keep a part of the model, so that their rows are scored with `personal_model`."""

    emits_histograms: ClassVar[bool] = False
    """Whether steps emit masses `[..., 2, bins]` of a `ScoreHistogram`, and finish uploads no more than their mean."""

    hands_scores_to_audit: ClassVar[bool] = False
    """Whether uploads carry a pool that only an audit reads, in the memory of a simulation (see `pool_audit.py`)."""

    objective: Objective
    weight_decay: float = option(0.0, "Weight decay of the local steps.", at_least=0)

    def __post_init__(self) -> None:
        check_fields(self)

    def without_server_settings(self) -> Algorithm:
        """The algorithm with fixed values for what only the server reads: equal results take the same local steps."""
        return self

    @abstractmethod
    def init(self, setting: Setting, model: Model) -> Server:
        """The server's state before the first round."""

    @abstractmethod
    def dispatch(self, setting: Setting, server: Server, cohort: Cohort, phase: Phase) -> Download:
        """What the clients of the cohort are sent."""

    def initial_client_state(self, download: Download) -> Tree:
        """The state of a client before its first visit; `()` for algorithms whose clients keep nothing."""
        return ()

    @abstractmethod
    def begin(self, download: Download, client_state: Tree) -> Tree:
        """The local state of a client before its first local step."""

    @abstractmethod
    def step(self, network: Network, download: Download, local: Tree, batch: Batch) -> tuple[Tree, Tree]:
        """One local step: the new local state, and what the step emits (the engine stacks it over the steps)."""

    @abstractmethod
    def monitored_loss(self, network: Network, download: Download, local: Tree, batch: Batch) -> Tensor:
        """The loss `[...]` of a local state on a batch, never negative. Engines ask for it at the first local step."""

    @abstractmethod
    def finish(self, download: Download, client_state: Tree, local: Tree, emitted: Tree) -> tuple[Upload, Tree]:
        """The upload, and the state that the client keeps until its next visit."""

    @abstractmethod
    def merge(self, setting: Setting, server: Server, reduced: Upload, cohort: Cohort, phase: Phase) -> Server:
        """The server after the round. `reduced.mean` is `()` in a scoring round, and in a round that nobody came to."""

    @abstractmethod
    def extract_model(self, shared: Tree) -> Model:
        """The model that `shared` contains."""

    def personal_model(self, model: Model, client_state: Tree) -> Model:
        """The model that scores the rows of a client that has been visited, where clients keep a part of it."""
        return model

    def replace_model(self, shared: Tree, model: Model) -> Tree:
        """`shared` with another model, and everything else (duals, control variates) as it was."""
        return replace_only_node(shared, model)

    def local_model(self, local: Tree) -> Model:
        """The model that a client's local state contains."""
        return find_only_node(local, Model)

    def replace_local_model(self, local: Tree, model: Model) -> Tree:
        """The local state with another model, and everything else as it was."""
        return replace_only_node(local, model)

    def stage_output(self, last: Tree, mean: Tree) -> Tree:
        """What a stage with averaged output passes on: the mean, except where the last must stay (control variates)."""
        return mean

    def diagnostics(self, shared: Tree) -> dict[str, Tensor]:
        """Numbers that get a column in the records, such as the dual variables; none for most algorithms."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Wrapper(ABC):
    """Changes what clients do in any algorithm, which it sees as `inner`: that may be wrapped already.

    `local` is always the local state of `inner`. What a wrapper itself carries from step to step is `carried`, and what
    it remembers from visit to visit is `client_state`; both are `()` for wrappers that need neither. A wrapper that
    overrides nothing changes nothing. The shared state keeps its shape, so server and clients need not be told.
    """

    name: ClassVar[str]
    needs_keys: ClassVar[bool] = False
    """Whether local steps use `batch.key`."""

    uploads_gradients_only: ClassVar[bool] = False
    """Whether rows enter the wrapper's states and uploads through the inner steps alone."""

    has_personal_models: ClassVar[bool] = False
    """Whether clients keep a part of the model, so that their rows are scored with `personal_model`."""

    def __post_init__(self) -> None:
        check_fields(self)

    def check_algorithm(self, algorithm: Algorithm, buffers: Collection[str]) -> None:
        """Refuse an algorithm, with all its wrappers, or a model with these buffers; most wrappers take any."""
        return

    def bind(self, parameters: Mapping[str, int]) -> Wrapper:
        """The wrapper for a model with these parameters: their lengths by name, in the order of the flat vector."""
        return self

    def initial_client_state(self, inner: Algorithm, download: Download) -> Tree:
        """What the wrapper remembers of a client before its first visit."""
        return ()

    def begin(self, inner: Algorithm, download: Download, local: Tree, client_state: Tree) -> tuple[Tree, Tree]:
        """The local state before the first step, and what the wrapper carries into it."""
        return local, ()

    def step(
        self, inner: Algorithm, network: Network, download: Download, local: Tree, carried: Tree, batch: Batch
    ) -> tuple[Tree, Tree, Tree]:
        """One local step: the new local state, what is carried to the next step, and what the step emits."""
        local, emitted = inner.step(network, download, local, batch)
        return local, carried, emitted

    def finish(
        self, inner: Algorithm, upload: Upload, local: Tree, carried: Tree, client_state: Tree
    ) -> tuple[Upload, Tree]:
        """The upload, and what the wrapper remembers until the client's next visit."""
        return upload, client_state

    def personal_model(self, model: Model, client_state: Tree) -> Model:
        """The model that scores the rows of a client that has been visited, where clients keep a part of it."""
        return model


@dataclass(frozen=True, kw_only=True)
class UploadTransform(ABC):
    """What happens to an upload on its way from a client to the mean, such as clipping, quantization or noise.

    `client` runs at the client after `finish`, `decode` at the server for every upload before the mean, and `server`
    after it, in reversed order. All three are pure. `client` and `decode` accept any leading dimensions (those of
    `key`) and can be traced by a compiler. Random numbers come from the key alone (`random_tensors.py`), at the server
    from `server_round.noise`. In a scoring round `upload.mean` is `()`, and so is its transform. A transform may keep a
    state at the server from round to round, and announce a part of it to the clients.
    """

    name: ClassVar[str]
    encodes: ClassVar[bool] = False
    """Whether `client` returns other tensors than it was given. At most one such transform is allowed, as the last."""

    needs_fixed_denominator: ClassVar[bool] = False
    """Whether sums must be divided by the expected number of clients, and rounds without clients still have a mean."""

    refuses_pools: ClassVar[bool] = False
    """Whether uploads must have an empty `pool`, because the transform protects `mean` alone."""

    def __post_init__(self) -> None:
        check_fields(self)

    def initial_state(self, shared: Tree) -> Tree:
        """What a client keeps from visit to visit, before its first one; `()` for most transforms."""
        return ()

    def initial_server_state(self, shared: Tree) -> Tree:
        """What the server keeps from round to round, before the first one; `()` for most transforms."""
        return ()

    def announce(self, server_state: Tree) -> Tree:
        """What clients are told before their visit; `()` for most transforms."""
        return ()

    def client(self, upload: Upload, state: Tree, key: Tensor, announced: Tree = ()) -> tuple[Upload, Tree]:
        """What the client sends instead of `upload`, and its new state; `key` has one entry per client."""
        return upload, state

    def zero_mean(self, zeros: Tree) -> Tree:
        """The mean over no clients, from zeros in the shape of an upload: other where `client` adds numbers to it."""
        return zeros

    def decode(self, upload: Upload, shared: Tree) -> Upload:
        """The upload that the mean takes, from what a client sent; `shared` has the shapes of `upload.mean`."""
        return upload

    def server(self, mean: Tree, state: Tree, server_round: ServerRound) -> tuple[Tree, Tree]:
        """The mean that the algorithm merges, from that of the cohort, and the server's new state."""
        return mean, state


@dataclass(frozen=True, kw_only=True)
class Mean(ABC):
    """How the uploads of a cohort become one. Any mean but the weighted one needs all uploads at the same time."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_fields(self)

    def check_cohort_size(self, clients: int) -> None:
        """Refuse a cohort that is too small for the parameters; most means take any number of clients."""
        return

    @abstractmethod
    def combine(self, uploads: Tree, weights: Tensor) -> Tree:
        """One tree from uploads `[M, ...]` and the clients' weights `[M]`, which sum to 1."""


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer(ABC):
    """How the server moves the model, given the mean change of the cohort.

    It sees the weights of the model alone: BatchNorm statistics, dual variables and control variates change as the
    algorithm says (`Algorithm.replace_model`).
    """

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, weights: Tensor) -> Tree:
        """The optimizer's state before the first round; `()` if it keeps nothing."""
        return ()

    @abstractmethod
    def update(self, change: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        """The change `[d]` that is added to the weights, and the new state."""


class Engine(ABC):
    """Holds the clients' data and states, and runs the client methods for a cohort."""

    name: ClassVar[str]

    @abstractmethod
    def visit(self, download: Download, cohort: Cohort) -> Visits:
        """Run the local steps of the cohort, and average the uploads with the weights of the cohort."""

    @abstractmethod
    def client_states(self) -> dict[int, Tree]:
        """The state of every client, for a checkpoint."""

    @abstractmethod
    def restore_client_states(self, client_states: dict[int, Tree]) -> None:
        """Restore the state of every client."""
