"""The compiled engine: the batched engine whose local steps, gathering of rows included, are one compiled loop.

Small models are bound by the cost of starting operations, not by arithmetic. Compiling takes seconds, so `auto` chooses
this engine for long runs only; the choice depends on the configuration alone, so that a resumed run makes it again. The
number of clients, the number of steps and the learning rate are inputs of the compiled loop, so that a new cohort or
stage needs no new compilation.
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
from fedauc.engines.batched import CohortRows, LocalResult, PendingVisit, StackedEngine
from fedauc.engines.kernels import KernelNetwork, Unsupported
from fedauc.engines.simulator import count_cores
from fedauc.interfaces import Algorithm, Batch, BatchSize, Cohort, Download, Phase, Setting, Upload, Visits
from fedauc.network import ModuleNetwork
from fedauc.progress import report_activity
from fedauc.trees import Tree, is_empty, tree_add, tree_at, tree_leaves, tree_map
from fedauc.uploads import UploadPipeline

CHECKED_GUARDS = ("TENSOR_MATCH", "SHAPE_ENV", "DUPLICATE_INPUT")
"""What a call checks before it runs compiled code: its tensors. The engine itself does not change."""

COMPILER_OPTIONS: dict[str, Any] = {
    "cpp.threads": 1,
    "cpp_wrapper": True,
    "guard_filter_fn": lambda guards: [guard.guard_type in CHECKED_GUARDS for guard in guards],
    "realize_reads_threshold": 1,
}
"""One thread, since two take twice as long beside torch's own; a C++ caller instead of a Python one, so that two
threads can call it; and gathered rows are stored, since a step reads them twice."""

TRUSTED_ERROR = 1e-3
"""How far a compiled visit's first result may be from the uncompiled one, relative to the largest value."""

TWO_CORES_FROM = 1 << 23
"""Multiplications in a whole visit from which a second core is worth a second call."""

CompiledFunction = Callable[..., Any]
Arguments = tuple[Any, ...]
ReducedVisit = tuple[Upload, Tree, Tensor]
"""The reduced upload, the clients' new states, and their mean loss."""


class VisitShape(NamedTuple):
    """What a compiled function is specialized for: sizes of one, which torch treats separately, and batch sizes."""

    one_client: bool
    one_step: bool
    batch: BatchSize


class UnknownEntry:
    """A phase's entry that changes from round to round, so that no compiled code may depend on it."""

    def __bool__(self) -> bool:
        raise RuntimeError("this entry of the phase is not known to compiled code")

    __eq__ = __hash__ = __bool__  # type: ignore[assignment]


UNKNOWN: Any = UnknownEntry()


@final
class CompiledEngine(StackedEngine):
    """The stack with torch's compiler, for long runs on a CPU.

    Compiles the whole visit, or only its local steps where the algorithm's other methods depend on the round.
    """

    name: ClassVar[str] = "compiled"

    def __init__(
        self,
        algorithm: Algorithm,
        network: ModuleNetwork,
        clients: Clients,
        setting: Setting,
        uploads: UploadPipeline | None = None,
    ) -> None:
        super().__init__(algorithm, network, clients, setting, uploads)
        if not isinstance(self._stacked_network, KernelNetwork):
            raise Unsupported("it has layers without a kernel, which are not compiled")
        _check_compiler()
        self.lengths = self._stacked_network.lengths
        self._second_threads: dict[int, ThreadPoolExecutor] = {}
        self._compiled_visits: dict[VisitShape, CompiledFunction | None] = {}
        self._compiled_loops: dict[tuple[VisitShape, tuple[torch.Size, ...]], CompiledFunction | None] = {}

    def _visit_cohort(self, download: Download, cohort: Cohort) -> Visits:
        shape = VisitShape(len(cohort.clients) == 1, download.phase.local_steps == 1, download.phase.batch)
        # A scoring cycle is too short to compile for. Transforms and other means run after the compiled steps.
        if download.phase.scoring or not self._uploads.is_plain or self._compiled_visits.get(shape, self) is None:
            return super()._visit_cohort(download, cohort)
        rows, shares = self._draw_rows(download, cohort), self._send_shares(cohort)
        client_state = self._stack_client_states(download, cohort)
        shared, anchor = _detach_leaves((download.shared, download.anchor))
        arguments = (shape.batch, self._send_learning_rate(download), rows, client_state, shares, shared, anchor)
        if shape not in self._compiled_visits:
            expected = self._run_uncompiled(download, cohort, client_state, rows, shares)
            _mark_dynamic((rows, client_state, shares), rows, shape)
            self._compiled_visits[shape] = _compile_if_correct(self._traced_visit, arguments, expected)
        function = self._compiled_visits[shape]
        if function is None:
            return super()._visit_cohort(download, cohort)
        products = self._count_products(download, cohort) * download.phase.local_steps
        if self._is_small_visit(download, cohort) and products >= TWO_CORES_FROM:
            upload, client_state, loss = self._run_in_halves(function, arguments)
        else:
            upload, client_state, loss = function(*arguments)
        self._store_client_states(client_state, cohort)
        return Visits(upload, loss)

    def _run_local_steps(self, pending: PendingVisit) -> LocalResult:
        download, rows = pending.download, pending.rows
        shape = VisitShape(len(rows.weights) == 1, download.phase.local_steps == 1, download.phase.batch)
        # A local state may hold what its visit was sent, and has other shapes where visits have other numbers of steps.
        key = shape, tuple(leaf.shape[1:] for leaf in tree_leaves(pending.local))
        if download.phase.scoring or self._compiled_loops.get(key, self) is None:
            return self._run_steps_one_by_one(pending)
        trees = _detach_leaves((download.shared, download.anchor, pending.local))
        arguments = (shape.batch, self._send_learning_rate(download), rows, *trees)
        if key not in self._compiled_loops:
            expected = self._run_steps_one_by_one(pending)
            _mark_dynamic((rows, trees), rows, shape)
            self._compiled_loops[key] = _compile_if_correct(self._traced_steps, arguments, expected)
        function = self._compiled_loops[key]
        return self._run_steps_one_by_one(pending) if function is None else function(*arguments)

    def _run_in_halves(self, function: CompiledFunction, arguments: Arguments) -> ReducedVisit:
        """Run each half of the cohort on a core of its own; the bits are the same if there is only one core."""
        batch, learning_rate, rows, client_state, shares, *sent = arguments
        middle = len(shares) // 2
        if middle < 2:
            result: ReducedVisit = function(*arguments)
            return result
        halves = (slice(middle), slice(middle, None))
        parts = [tree_map(lambda leaf, half=half: leaf[half], (rows, client_state, shares)) for half in halves]
        first, second = ((batch, learning_rate, *part, *sent) for part in parts)
        if count_cores() == 1:
            return _join_halves([function(*first), function(*second)], middle / len(shares))
        pending = self._get_second_thread().submit(torch.no_grad()(function), *second)
        return _join_halves([function(*first), pending.result()], middle / len(shares))

    def _get_second_thread(self) -> ThreadPoolExecutor:
        """A thread beside this one; a forked process needs a new one, since threads do not survive a fork."""
        process = os.getpid()
        if process not in self._second_threads:
            self._second_threads = {process: ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))}
        return self._second_threads[process]

    def _run_uncompiled(
        self, download: Download, cohort: Cohort, client_state: Tree, rows: CohortRows, shares: Tensor
    ) -> ReducedVisit:
        """The result that a compiled visit must give."""
        expanded = self._expand_download(download, len(shares))
        local = self._algorithm.begin(expanded, client_state)
        pending = PendingVisit(expanded, cohort, client_state, local, rows)
        return self._reduce_uploads(expanded, client_state, self._run_steps_one_by_one(pending), shares)

    def _reduce_uploads(
        self, download: Download, client_state: Tree, result: LocalResult, shares: Tensor
    ) -> ReducedVisit:
        """The cohort's mean upload without transforms, its clients' new states, and their mean loss."""
        upload, client_state = self._algorithm.finish(download, client_state, result.local, result.emitted)
        mean = self._uploads.mean.combine(upload.mean, shares)
        return Upload(mean, upload.pool), client_state, result.losses.mean()

    def _send_learning_rate(self, download: Download) -> Tensor:
        return torch.tensor(download.phase.learning_rate, dtype=self._network.dtype, device=self._network.device)

    def _traced_visit(
        self,
        batch: BatchSize,
        learning_rate: Tensor,
        rows: CohortRows,
        client_state: Tree,
        shares: Tensor,
        shared: Tree,
        anchor: Tree,
    ) -> ReducedVisit:
        """A whole visit, from the download to the reduced upload, as the compiler sees it."""
        download = Download(_make_traced_phase(batch, learning_rate, rows), shared, anchor, rows.per_client)
        download = self._expand_download(download, len(shares))
        local = self._algorithm.begin(download, client_state)
        result = self._traced_steps(batch, learning_rate, rows, download.shared, download.anchor, local)
        return self._reduce_uploads(download, client_state, result, shares)

    def _traced_steps(
        self, batch: BatchSize, learning_rate: Tensor, rows: CohortRows, shared: Tree, anchor: Tree, local: Tree
    ) -> LocalResult:
        """Every local step as one scan, traced once whatever the number of steps."""
        # A scan's inputs and outputs must not share memory; where they do not, the compiler removes the copy.
        shared, anchor, local = (tree_map(_copy_contiguous, tree) for tree in (shared, anchor, local))
        download = Download(_make_traced_phase(batch, learning_rate, rows), shared, anchor)
        draws = tree_map(lambda leaf: leaf.transpose(0, 1), _list_step_draws(rows))
        # Vectors go from step to step in parts: joined and split again, they would be stored twice more.
        lengths = self.lengths

        def run_step(local: Tree, draw: Tree) -> tuple[Tree, Tree]:
            return self._algorithm.step(self._stacked_network, download, local, self._gather_batch(draw, rows.weights))

        def run_flat_step(carried: list[Tensor], draw: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            new_local, emission = run_step(_fill_tree(local, carried, lengths), _fill_tree(draws, draw))
            return (
                [*map(_copy_contiguous, _split_leaves(new_local, lengths))],
                [*map(_copy_contiguous, tree_leaves(emission))],
            )

        first = tree_at(draws, 0)
        first_batch = self._gather_batch(first, rows.weights)
        losses = self._algorithm.monitored_loss(self._stacked_network, download, local, first_batch)
        # This step is run for the structure of what it emits; the compiler drops its numbers.
        structure = run_step(local, first)[1]
        start = [*map(_copy_contiguous, _split_leaves(local, lengths))]
        last, emitted = scan(run_flat_step, start, tree_leaves(draws))
        emitted_tree = _fill_tree(structure, [leaf.transpose(0, 1) for leaf in emitted])
        return LocalResult(_fill_tree(local, last, lengths), emitted_tree, losses)

    def _gather_batch(self, draw: Tree, weights: Tensor) -> Batch:
        index, per_client, moves, places, key = draw
        inputs = self._inputs[index] if is_empty(moves) else apply_crops(self._inputs[index], moves)
        return Batch(inputs, self._labels[index], weights, per_client, places, key)


def _list_step_draws(rows: CohortRows) -> tuple[Tree, ...]:
    """The draws that differ from step to step, `[M, I, ...]` each."""
    return rows.rows, rows.per_client, rows.moves, rows.places, rows.keys


def _join_halves(halves: Sequence[ReducedVisit], share: float) -> ReducedVisit:
    """A cohort's result from its halves, each of which has averaged its clients with their shares in the cohort."""
    (upload_1, state_1, loss_1), (upload_2, state_2, loss_2) = halves
    pairs = (upload_1.pool, state_1), (upload_2.pool, state_2)
    pool, client_state = tree_map(lambda *leaves: torch.cat(leaves), *pairs)
    upload = Upload(tree_add(upload_1.mean, upload_2.mean), pool)
    return upload, client_state, share * loss_1 + (1 - share) * loss_2


def _make_traced_phase(batch: BatchSize, learning_rate: Tensor, rows: CohortRows) -> Phase:
    """What compiled code may know of a round."""
    phase = Phase(UNKNOWN, UNKNOWN, UNKNOWN, learning_rate, rows.rows.shape[1], batch)
    return phase._replace(starts_stage=UNKNOWN, ends_cycle=UNKNOWN, ends_stage=UNKNOWN, learning_cycles=UNKNOWN)


def _compile_if_correct(method: Any, arguments: Arguments, expected: Tree) -> CompiledFunction | None:
    """The compiled method if its first result is right, else None: torch calls its compiled scan a prototype."""
    try:
        with report_activity("compiling the training step"):
            function = _compile_method(method)
            pairs = zip(tree_leaves(function(*arguments)), tree_leaves(expected), strict=True)
        if all(_nearly_equal(*pair) for pair in pairs):
            return function
        reason = "the result differs"
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split()[:20])
    logging.getLogger("fedauc").info("a part of a visit is not compiled: %s", reason)
    return None


def _compile_method(method: Any) -> CompiledFunction:
    """Compile a copy of the method's code: torch keeps compiled versions with the code, which all engines share."""
    function = FunctionType(method.__code__.replace(), method.__globals__, method.__name__, None, method.__closure__)
    options = dict(COMPILER_OPTIONS)
    try:
        # Imported late: the compiler takes a second to import, and 70 MB. Versions without graph passes do without.
        from fedauc.engines.compiled._split_vector_pass import SplitVectorPass

        options["post_grad_custom_pre_pass"] = SplitVectorPass(method.__self__.lengths)
    except ImportError:
        pass
    return partial(torch.compile(function, fullgraph=True, dynamic=False, options=options), method.__self__)


def _mark_dynamic(trees: Tree, rows: CohortRows, shape: VisitShape) -> None:
    """Let these tensors be compiled for any number of clients and steps."""
    for leaf in () if shape.one_client else tree_leaves(trees):
        torch._dynamo.maybe_mark_dynamic(leaf, 0)
    for leaf in () if shape.one_step else tree_leaves(_list_step_draws(rows)):
        torch._dynamo.maybe_mark_dynamic(leaf, 1)


def _detach_leaves(tree: Tree) -> Tree:
    """The same values, no tensor twice: duals may start as one zero, which the compiler would take for one input."""
    return tree_map(Tensor.detach, tree)


def _nearly_equal(actual: Tensor, expected: Tensor) -> bool:
    """Whether tensors differ by no more than rounding, which grows over the steps."""
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(actual, expected, rtol=TRUSTED_ERROR, atol=TRUSTED_ERROR * scale, equal_nan=True)


def _copy_contiguous(leaf: Tensor) -> Tensor:
    return leaf.clone(memory_format=torch.contiguous_format)


def _split_leaves(tree: Tree, lengths: list[int]) -> list[Tensor]:
    """A tree's leaves, with vectors `[M, d]` in parts of these lengths."""
    parts = [torch.split(leaf, lengths, 1) if _is_vector(leaf, lengths) else [leaf] for leaf in tree_leaves(tree)]
    return [part for leaf_parts in parts for part in leaf_parts]


def _fill_tree(tree: Tree, leaves: Sequence[Tensor], lengths: Sequence[int] = ()) -> Tree:
    """A tree of this structure with other leaves; vectors are joined from their parts."""
    remaining = iter(leaves)

    def fill_leaf(leaf: Tensor) -> Tensor:
        is_vector = _is_vector(leaf, lengths)
        return torch.cat([next(remaining) for _ in lengths], 1) if is_vector else next(remaining)

    return tree_map(fill_leaf, tree)


def _is_vector(leaf: Tensor, lengths: Sequence[int]) -> bool:
    return bool(lengths) and leaf.ndim == 2 and leaf.shape[1] == sum(lengths)


def _check_compiler() -> None:
    """Compile a tiny function, so that a machine without a C++ compiler says so here and not in the first round."""

    def negate(numbers: Tensor) -> Tensor:
        return -numbers

    # A copy of the code: torch allows each code object a few versions, and counts those of the whole process.
    function = FunctionType(negate.__code__.replace(), negate.__globals__)
    try:
        torch.compile(function, fullgraph=True)(torch.zeros(2))
    except RuntimeError as error:
        raise Unsupported(f"torch.compile does not work here ({' '.join(str(error).split()[:20])})") from error
