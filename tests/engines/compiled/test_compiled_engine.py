"""The compiled engine gives the loop's result, on few cases, since each is compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedauc import Clients, Recipe
from fedauc import engines as choice
from fedauc.engines import batched
from fedauc.engines.batched import BatchedEngine, CohortRows, LocalResult, StackedEngine
from fedauc.engines.compiled import engine as compiled_engine
from fedauc.engines.compiled.engine import CompiledEngine
from fedauc.engines.kernels import Unsupported
from fedauc.experiments.assembly import Assembly, assemble_training
from fedauc.interfaces import Cohort, Download, Phase
from fedauc.objectives.partial_auc_cvar import PartialAUCTopLoss
from fedauc.stages import Geometric
from fedauc.trees import Tree, tree_leaves

# The compiler itself uses what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")

FEATURES = 4

ADAPTIVE = Geometric(initial=1, decay=0.25, scale=1, local_steps="adaptive")
"""Stages of one cycle, the learning rate a quarter and the local steps twice those of the last."""

CASES: dict[str, dict[str, Any]] = {
    "cycp-fedavg": {"groups": 2, "weight_decay": 0.01, "stages": ADAPTIVE},
    "cycp-pairwise": {"groups": 7, "stages": ADAPTIVE},
    "codasca": {"prox": 0.1, "local_steps": 1},
    "a-scaffold": {"groups": 2},
    "scaffold": {"per_round": 4},
    "cycp-two-way-partial-auc": {"groups": 2, "stages": ADAPTIVE},
    "cycp-partial-auc": {"groups": 2, "stages": ADAPTIVE, "objective": PartialAUCTopLoss(max_fpr=0.2)},
    "cycp-average-precision": {"groups": 7},
}
"""Groups of 4 and 3 clients; groups of one, and scores to collect; one step, a stage's reference, memories, and duals
that are one and the same number at first; memories that roll over; a mean over steps; a value per row of a client."""

SLOW = ("codasca", "scaffold", "cycp-two-way-partial-auc", "cycp-partial-auc", "cycp-average-precision")


@pytest.fixture(autouse=True)
def _no_second_compilation() -> Iterator[None]:
    """One compilation for all cohorts, stages and steps of a run, and none that another run has used up."""
    with torch._dynamo.config.patch(recompile_limit=1):
        yield


def seven_clients() -> Clients:
    """Seven clients of 12 rows, a third positives, the first without any."""
    rng = np.random.default_rng(3)
    labels = (np.arange(84) % 3 == 0) & (np.arange(84) >= 12)
    return Clients.from_arrays(rng.normal(size=(84, FEATURES)) + labels[:, None], labels, client=np.arange(84) // 12)


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def assemble_run(engine: str, method: str, **settings: Any) -> Assembly:
    chosen: dict[str, Any] = {"cycles": 2, "local_steps": 5, "positives": 3, "negatives": 3, "dtype": "float64"}
    return assemble_training(Recipe.of(method, engine=engine, **{**chosen, **settings}), model(), seven_clients())


def compare_with_loop(method: str, **settings: Any) -> CompiledEngine:
    """Run the loop and the compiled engine, compare every round, and return the latter."""
    outcomes = []
    for name in ("loop", "compiled"):
        training, _, start = assemble_run(name, method, **settings)
        outcomes.append([(finished.state.server, finished.loss_value) for finished in training.rounds(start)])
    for (loop, loss), (other, other_loss) in zip(*outcomes, strict=True):
        assert other_loss == (None if loss is None else pytest.approx(loss, rel=1e-9))
        for left, right in zip(tree_leaves(loop), tree_leaves(other), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)
    assert isinstance(training.engine, CompiledEngine)
    return training.engine


def list_compiled(functions: dict[Any, Any]) -> list[bool]:
    return [function is not None for function in functions.values()]


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES],
)
def test_compiled_runs_equal_the_loops(method: str) -> None:
    """What is compiled is the whole visit, save where memories roll over at the end of a cycle: there the steps are."""
    engine = compare_with_loop(method, **CASES[method])
    rolling = method == "a-scaffold"
    assert list_compiled(engine._compiled_visits) == [not rolling]
    assert list_compiled(engine._compiled_loops) == [True] * rolling


def fail_to_call(*_: Any) -> Any:
    raise RuntimeError("no such loop")


def skip_local_steps(method: Any) -> Callable[..., Any]:
    """A miscompiled function: it takes no steps."""
    engine = method.__self__

    def visit(
        batch: Any, learning_rate: Any, rows: CohortRows, client_state: Tree, shares: Tensor, shared: Tree, anchor: Tree
    ) -> Any:
        phase = Phase(0, 0, 0, learning_rate, 1, batch)
        download = engine._expand_download(Download(phase, shared, anchor), len(shares))
        return engine._reduce_uploads(download, client_state, LocalResult(download.shared, (), shares), shares)

    def steps(batch: Any, learning_rate: Any, rows: CohortRows, shared: Tree, anchor: Tree, local: Tree) -> LocalResult:
        return LocalResult(local, (), rows.weights[:, 0])

    return visit if method.__name__ == "_traced_visit" else steps


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [(lambda _: fail_to_call, "no such loop"), (skip_local_steps, "the result differs")],
    ids=["fails", "errs"],
)
def test_what_does_not_compile_or_compiles_to_something_else_runs_step_by_step(
    compiler: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_engine, "_compile_method", compiler)
    with caplog.at_level(logging.INFO, logger="fedauc"):
        engine = compare_with_loop("cycp-fedavg")
    assert (list_compiled(engine._compiled_visits), list_compiled(engine._compiled_loops)) == ([False], [False])
    said = [record.getMessage() for record in caplog.records if record.name == "fedauc"]
    # Once for the visit and once for its steps.
    assert len(said) == 2
    assert all(reason in line for line in said)


def test_long_runs_are_compiled_and_short_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine() -> type:
        return type(assemble_run("auto", "cycp-fedavg").training.engine)

    assert engine() is BatchedEngine
    # 2 cycles of 7 rounds of 5 steps.
    monkeypatch.setattr(choice, "COMPILE_FROM", 70)
    assert engine() is CompiledEngine
    monkeypatch.setattr(choice, "COMPILE_FROM", 71)
    assert engine() is BatchedEngine


def test_what_has_no_kernel_is_not_compiled() -> None:
    recipe = Recipe.of("cycp-fedavg", engine="compiled")
    module = nn.Sequential(nn.Linear(FEATURES, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    with pytest.raises(Unsupported, match="layers without a kernel"):
        assemble_training(recipe, module, seven_clients())


@pytest.mark.slow
@pytest.mark.parametrize(("method", "own"), [("cycp-pairwise", {"groups": 1}), ("codasca", {"local_steps": 1})])
def test_halves_of_a_cohort_give_the_whole_and_the_same_bits_on_one_core(
    method: str, own: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cohorts of seven as three and four: means add up, scores and memories come one after another."""
    monkeypatch.setattr(compiled_engine, "TWO_CORES_FROM", 0)
    last = []
    for count in (2, 1):
        monkeypatch.setattr(compiled_engine, "count_cores", lambda count=count: count)
        engine = compare_with_loop(method, **own)
        assert bool(engine._second_threads) == (count == 2)
        training, _, start = assemble_run("compiled", method, **own)
        last.append([*training.rounds(start)][-1].state.server)
    pairs = zip(*map(tree_leaves, last), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize("engine", ["batched", "compiled"])
def test_small_visits_take_one_thread_and_leave_torchs_threads_as_they_were(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn_rounds, draw = [], StackedEngine._draw_rows

    def watch_draws(self: StackedEngine, download: Download, cohort: Cohort) -> CohortRows:
        drawn_rounds.append(torch.get_num_threads())
        return draw(self, download, cohort)

    monkeypatch.setattr(StackedEngine, "_draw_rows", watch_draws)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        training, _, start = assemble_run(engine, "cycp-fedavg")
        next(training.rounds(start))
        monkeypatch.setattr(batched, "ONE_THREAD_BELOW", 0)
        next(training.rounds(start))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert drawn_rounds == [1, 2]
