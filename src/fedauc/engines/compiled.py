"""The compiled engine: the batched engine whose local steps, gathering their rows included, are one compiled loop.

Small models are bound by the cost of starting operations, not by arithmetic. Compiling takes seconds, so `auto` chooses
this engine for long runs only; the choice depends on the configuration alone, so that a resumed run makes it again. The
number of clients, the number of steps and the learning rate are inputs of the compiled loop, so that a new cohort or stage
needs no new compilation.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan

from fedauc.data.augmentation import apply_crops
from fedauc.data.clients import Clients
from fedauc.engines.batched import Advanced, Opened, Rows, StackedEngine
from fedauc.engines.crew import cores
from fedauc.engines.kernels import Unsupported
from fedauc.engines.stacked import KernelNetwork
from fedauc.interfaces import Algorithm, Batch, BatchSize, Cohort, Download, Phase, Setting, Upload, Visits
from fedauc.network import ModuleNetwork
from fedauc.trees import Tree, is_empty, tree_add, tree_at, tree_leaves, tree_map

CHECKED = ("TENSOR_MATCH", "SHAPE_ENV", "DUPLICATE_INPUT")
"""What a call checks before it trusts what was compiled: its tensors. The engine itself does not change."""

OPTIONS: dict[str, Any] = {
    "cpp.threads": 1,
    "cpp_wrapper": True,
    "guard_filter_fn": lambda guards: [guard.guard_type in CHECKED for guard in guards],
    "realize_reads_threshold": 1,
}
"""One thread, since two take twice as long beside torch's own; a C++ caller instead of a Python one, so that two
threads can call it; and gathered rows are written down, since a step reads them twice."""

TRUST = 1e-3
"""How far a compiled visit's first result may be from the plain steps', relative to the largest value."""

LARGE = 1 << 23
"""Multiplications of a whole visit from which two cores are worth a second call."""

Compiled = Callable[..., Any]
Arguments = tuple[Any, ...]
Returned = tuple[Upload, Tree, Tensor]
"""The reduced upload, what clients remember, and their mean loss."""


class Kind(NamedTuple):
    """What a compiled function is built for: a size of one, unlike others, and the batch's."""

    one_client: bool
    one_step: bool
    batch: BatchSize


class Unknown:
    """A phase's entry that changes from round to round, so that nothing compiled may depend on it."""

    def __bool__(self) -> bool:
        raise RuntimeError("the phase is not known to what is compiled")

    __eq__ = __hash__ = __bool__  # type: ignore[assignment]


UNKNOWN: Any = Unknown()


@final
class CompiledEngine(StackedEngine):
    """A visit as one compiled function; its local steps only, where the algorithm's other verbs depend on the round."""

    name: ClassVar[str] = "compiled"

    def __init__(self, algorithm: Algorithm, network: ModuleNetwork, clients: Clients, setting: Setting) -> None:
        super().__init__(algorithm, network, clients, setting)
        if not isinstance(self._stacked, KernelNetwork):
            raise Unsupported("it has layers without a kernel, which are not compiled")
        _check_compiler()
        self.lengths = self._stacked.lengths
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._visits: dict[Kind, Compiled | None] = {}
        self._loops: dict[Kind, Compiled | None] = {}

    def _visited(self, download: Download, cohort: Cohort) -> Visits:
        kind = Kind(len(cohort.clients) == 1, download.phase.local_steps == 1, download.phase.batch)
        # A scoring cycle is too short to compile for.
        if download.phase.scoring or self._visits.get(kind, self) is None:
            return super()._visited(download, cohort)
        rows, client_state, shares = self._draw(download, cohort), self._recall(download, cohort), self._shares(cohort)
        shared, anchor = _apart((download.shared, download.anchor))
        arguments = (kind.batch, self._learning_rate(download), rows, client_state, shares, shared, anchor)
        if kind not in self._visits:
            plain = self._plain(download, cohort, client_state, rows, shares)
            _let_vary((rows, client_state, shares), rows, kind)
            self._visits[kind] = _trusted(self._visit, arguments, plain)
        compiled = self._visits[kind]
        if compiled is None:
            return super()._visited(download, cohort)
        halved = (
            self._is_small(download, cohort) and self._products(download, cohort) * download.phase.local_steps >= LARGE
        )
        upload, client_state, value = (self._by_halves if halved else _at_once)(compiled, arguments)
        self._remember(client_state, cohort)
        return Visits(upload, value)

    def _by_halves(self, compiled: Compiled, arguments: Arguments) -> Returned:
        """Each half of a cohort on a core of its own; with the same bits if there is only one."""
        batch, learning_rate, rows, client_state, shares, *sent = arguments
        middle = len(shares) // 2
        if middle < 2:
            return _at_once(compiled, arguments)
        cuts = (slice(middle), slice(middle, None))
        given = [tree_map(lambda leaf, cut=cut: leaf[cut], (rows, client_state, shares)) for cut in cuts]
        first, second = ((batch, learning_rate, *part, *sent) for part in given)
        if cores() == 1:
            return _added([compiled(*first), compiled(*second)], middle / len(shares))
        other = self._thread().submit(_quietly, compiled, second)
        return _added([compiled(*first), other.result()], middle / len(shares))

    def _thread(self) -> ThreadPoolExecutor:
        """A thread beside this one. A process that was forked has none of its parent's."""
        process = os.getpid()
        if process not in self._threads:
            self._threads = {process: ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))}
        return self._threads[process]

    def _plain(self, download: Download, cohort: Cohort, client_state: Tree, rows: Rows, shares: Tensor) -> Tree:
        """What a compiled visit must give."""
        wide = self._widened(download, len(shares))
        opened = Opened(wide, cohort, client_state, self._algorithm.begin(wide, client_state), rows)
        return self._reduced(wide, client_state, self._step_by_step(opened), shares)

    def _advance(self, opened: Opened) -> Advanced:
        download, rows = opened.download, opened.rows
        kind = Kind(len(rows.weights) == 1, download.phase.local_steps == 1, download.phase.batch)
        if download.phase.scoring or self._loops.get(kind, self) is None:
            return self._step_by_step(opened)
        trees = _apart((download.shared, download.anchor, opened.local))
        arguments = (kind.batch, self._learning_rate(download), rows, *trees)
        if kind not in self._loops:
            plain = self._step_by_step(opened)
            _let_vary((rows, trees), rows, kind)
            self._loops[kind] = _trusted(self._steps, arguments, plain)
        compiled = self._loops[kind]
        return self._step_by_step(opened) if compiled is None else compiled(*arguments)

    def _learning_rate(self, download: Download) -> Tensor:
        return torch.tensor(download.phase.learning_rate, dtype=self._network.dtype, device=self._network.device)

    def _visit(
        self,
        batch: BatchSize,
        learning_rate: Tensor,
        rows: Rows,
        client_state: Tree,
        shares: Tensor,
        shared: Tree,
        anchor: Tree,
    ) -> tuple[Upload, Tree, Tensor]:
        """From what is sent to what comes back."""
        download = self._widened(Download(_phase(batch, learning_rate, rows), shared, anchor), len(shares))
        local = self._algorithm.begin(download, client_state)
        advanced = self._steps(batch, learning_rate, rows, download.shared, download.anchor, local)
        return self._reduced(download, client_state, advanced, shares)

    def _steps(
        self, batch: BatchSize, learning_rate: Tensor, rows: Rows, shared: Tree, anchor: Tree, local: Tree
    ) -> Advanced:
        """Every local step, traced once whatever their number."""
        # What goes into a loop or comes out of it must not share memory; where it does not, the copy is compiled away.
        shared, anchor, local = (tree_map(_copy, tree) for tree in (shared, anchor, local))
        download = Download(_phase(batch, learning_rate, rows), shared, anchor)
        drawn = tree_map(lambda leaf: leaf.transpose(0, 1), (rows.rows, rows.own, rows.moves))

        def step(local: Tree, drawn: Tree) -> tuple[Tree, Tree]:
            return self._algorithm.step(self._stacked, download, local, self._batch(drawn, rows.weights))

        # Vectors go from step to step in parts: joined and cut again, they would be written down twice more.
        lengths = self.lengths

        def flat_step(carried: list[Tensor], now: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            after, emitted = step(_filled(local, carried, lengths), _filled(drawn, now))
            return [*map(_copy, _leaves(after, lengths))], [*map(_copy, tree_leaves(emitted))]

        first = tree_at(drawn, 0)
        losses = self._algorithm.monitored_loss(self._stacked, download, local, self._batch(first, rows.weights))
        # For its shape alone: the compiler drops the numbers.
        shape = step(local, first)[1]
        last, emitted = scan(flat_step, [*map(_copy, _leaves(local, lengths))], tree_leaves(drawn))
        scores = _filled(shape, [leaf.transpose(0, 1) for leaf in emitted])
        return Advanced(_filled(local, last, lengths), scores, losses)

    def _batch(self, drawn: Tree, weights: Tensor) -> Batch:
        index, own, moves = drawn
        inputs = self._inputs[index]
        return Batch(inputs if is_empty(moves) else apply_crops(inputs, moves), self._labels[index], weights, own)


def _at_once(compiled: Compiled, arguments: Arguments) -> Returned:
    returned: Returned = compiled(*arguments)
    return returned


def _quietly(compiled: Compiled, arguments: Arguments) -> Returned:
    """In a thread of its own, which has not heard that no gradients are wanted."""
    with torch.no_grad():
        return _at_once(compiled, arguments)


def _added(halves: Sequence[Returned], share: float) -> Returned:
    """What a cohort returns, from its halves: each brings its clients' part of the mean."""
    (one, left, first), (two, right, second) = halves
    pool, client_state = tree_map(lambda *leaves: torch.cat(leaves), (one.pool, left), (two.pool, right))
    return Upload(tree_add(one.mean, two.mean), pool), client_state, share * first + (1 - share) * second


def _phase(batch: BatchSize, learning_rate: Tensor, rows: Rows) -> Phase:
    """What compiled code may know of a round."""
    known = Phase(UNKNOWN, UNKNOWN, UNKNOWN, learning_rate, rows.rows.shape[1], batch)
    return known._replace(starts_stage=UNKNOWN, ends_cycle=UNKNOWN, ends_stage=UNKNOWN, learning_cycles=UNKNOWN)


def _trusted(method: Any, arguments: Arguments, plain: Tree) -> Compiled | None:
    """A method compiled, if that gives the plain steps' result: torch calls what it compiles loops with a prototype."""
    try:
        compiled = _compiled(method)
        pairs = zip(tree_leaves(compiled(*arguments)), tree_leaves(plain), strict=True)
        if all(_alike(*pair) for pair in pairs):
            return compiled
        reason = "the result differs"
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split()[:20])
    logging.getLogger("fedauc").info("a part of a visit is not compiled: %s", reason)
    return None


def _compiled(method: Any) -> Compiled:
    """A method compiled by itself: torch keeps what it compiled with the code, which all engines share."""
    own = FunctionType(method.__code__.replace(), method.__globals__, method.__name__, None, method.__closure__)
    options = {**OPTIONS, **_passes(method.__self__.lengths)}
    return partial(torch.compile(own, fullgraph=True, dynamic=False, options=options), method.__self__)


def _passes(lengths: list[int]) -> dict[str, Any]:
    """What to do to a graph besides; nothing, where this compiler has no place for it."""
    try:
        # Not before it is needed: the compiler takes a second to import, and 70 MB.
        from fedauc.engines._apart import Apart
    except ImportError:
        return {}
    return {"post_grad_custom_pre_pass": Apart(lengths)}


def _let_vary(trees: Tree, rows: Rows, kind: Kind) -> None:
    """Have these compiled for any number of clients and steps."""
    for leaf in () if kind.one_client else tree_leaves(trees):
        torch._dynamo.maybe_mark_dynamic(leaf, 0)
    for leaf in () if kind.one_step else tree_leaves((rows.rows, rows.own, rows.moves)):
        torch._dynamo.maybe_mark_dynamic(leaf, 1)


def _apart(tree: Tree) -> Tree:
    """The same values, no tensor twice: duals may start as one zero, and the compiler would have them stay one."""
    return tree_map(Tensor.detach, tree)


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether they differ by no more than rounding, which grows over the steps."""
    scale = float(other.abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=TRUST, atol=TRUST * scale, equal_nan=True)


def _copy(leaf: Tensor) -> Tensor:
    return leaf.clone(memory_format=torch.contiguous_format)


def _leaves(tree: Tree, lengths: list[int]) -> list[Tensor]:
    """A tree's leaves, with vectors `[M, d]` in parts of these lengths."""
    cut = [torch.split(leaf, lengths, 1) if _whole(leaf, lengths) else [leaf] for leaf in tree_leaves(tree)]
    return [part for parts in cut for part in parts]


def _filled(tree: Tree, leaves: Sequence[Tensor], lengths: Sequence[int] = ()) -> Tree:
    """A tree of this shape with other leaves, vectors joined of their parts."""
    left = iter(leaves)

    def fill(leaf: Tensor) -> Tensor:
        return torch.cat([next(left) for _ in lengths], 1) if _whole(leaf, lengths) else next(left)

    return tree_map(fill, tree)


def _whole(leaf: Tensor, lengths: Sequence[int]) -> bool:
    return bool(lengths) and leaf.ndim == 2 and leaf.shape[1] == sum(lengths)


def _check_compiler() -> None:
    """Compile something tiny: a machine without a C++ compiler says so here, not in the first round."""

    def tiny(numbers: Tensor) -> Tensor:
        return -numbers

    # With code of its own: torch allows code a few versions, and counts a whole process.
    own = FunctionType(tiny.__code__.replace(), tiny.__globals__)
    try:
        torch.compile(own, fullgraph=True)(torch.zeros(2))
    except RuntimeError as error:
        raise Unsupported(f"torch.compile does not work here ({' '.join(str(error).split()[:20])})") from error
