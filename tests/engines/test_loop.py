"""The loop engine's threads: the same bits as without, and only where they pay and cannot change the result."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedauc import Clients, Recipe
from fedauc.engines import loop
from fedauc.engines.loop import LoopEngine
from fedauc.experiments.assembly import assemble_training
from fedauc.trees import Tree, tree_leaves

FEATURES = 4
thread_ids: set[int] = set()
"""The threads in which a model ran."""


class Noting(nn.Module):
    """Says in which thread it runs, and that no other thread runs it meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = False

    def forward(self, inputs: Tensor) -> Tensor:
        assert not self.busy, "two threads run one module"
        self.busy = True
        time.sleep(0.001)
        self.busy = False
        thread_ids.add(threading.get_ident())
        return inputs


def model(dropout: float) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(Noting(), nn.Linear(FEATURES, 3), nn.BatchNorm1d(3), nn.Dropout(dropout), nn.Linear(3, 1))


def six_clients() -> Clients:
    """Six clients of 12 rows, a third positives."""
    labels = np.arange(72) % 3 == 0
    rows = np.random.default_rng(5).normal(size=(72, FEATURES)) + labels[:, None]
    return Clients.from_arrays(rows, labels, client=np.arange(72) // 12)


def run(method: str, threads: int, dropout: float = 0.0) -> tuple[list[Tree], dict[int, Tree]]:
    """Every round's state and loss, and the memories at the end."""
    thread_ids.clear()
    recipe = Recipe.of(method, engine="loop", cycles=2, local_steps=3, positives=2, negatives=3)
    training, _, start = assemble_training(recipe, model(dropout), six_clients())
    assert isinstance(training.engine, LoopEngine)
    training.engine._thread_pool.size = threads
    rounds = [(done.state.server, () if done.loss is None else done.loss) for done in training.rounds(start)]
    return rounds, training.engine.client_states()


@pytest.mark.parametrize("method", ["rs-pairwise", "a-scaffold", "codasca"])
def test_threads_give_the_same_bits(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "USE_THREADS_FROM", 0.0)
    one = run(method, 1)
    assert thread_ids == {threading.get_ident()}
    for _ in range(3):
        two = run(method, 2)
        assert list(two[1]) == list(one[1])
        pairs = zip(
            tree_leaves((one[0], tuple(one[1].values()))), tree_leaves((two[0], tuple(two[1].values()))), strict=True
        )
        assert all(torch.equal(left, right) for left, right in pairs)
    # The first client is visited in this thread, to see whether sharing pays.
    assert threading.get_ident() in thread_ids
    assert len(thread_ids) > 1


def test_a_module_that_draws_random_numbers_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "USE_THREADS_FROM", 0.0)
    run("codasca", 2, dropout=0.5)
    assert thread_ids == {threading.get_ident()}


def test_fast_models_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "USE_THREADS_FROM", 60.0)
    run("codasca", 2)
    assert thread_ids == {threading.get_ident()}


# Cores, torch's threads, processes of a torchrun, and the threads left for visits: never fewer than one.
@pytest.mark.parametrize(
    ("cores", "threads", "ranks", "spare"), [(8, 1, 1, 8), (8, 2, 1, 4), (8, 2, 2, 2), (2, 2, 1, 1), (2, 1, 4, 1)]
)
def test_threads_and_processes_share_the_cores(
    cores: int, threads: int, ranks: int, spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert loop.count_spare_cores() == spare


def test_what_a_client_raises_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "USE_THREADS_FROM", 0.0)
    monkeypatch.setattr(LoopEngine, "_draw_batches", fail_for_client(LoopEngine._draw_batches))
    with pytest.raises(RuntimeError, match="client 3 is ill"):
        run("codasca", 2)


def fail_for_client(batches: object) -> object:
    def inner(self: LoopEngine, download: object, client: int) -> object:
        if client == 3:
            raise RuntimeError("client 3 is ill")
        return batches(self, download, client)  # type: ignore[operator]

    return inner
