"""Every callback passes the suite that is exported for callbacks of one's own, and the suite notices mistakes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fedauc.experiments.callbacks import Callback, find_callbacks
from fedauc.experiments.callbacks.early_stopping import EarlyStopping
from fedauc.experiments.run_view import RunView
from fedauc.testing.callback import check_callback, train_run
from fedauc.trees import Tree, tree_map

MEMBERS = [kind() for kind in find_callbacks().values() if not kind.needs_packages]
"""Trackers that need packages are in `tests/experiments/test_tracking_tools.py`."""


@pytest.mark.parametrize("callback", [*MEMBERS, EarlyStopping(1), EarlyStopping(2)], ids=repr)
def test_a_callback_keeps_its_promises(callback: Callback) -> None:
    check_callback(callback)


class Count(NamedTuple):
    rounds: Tensor


@dataclass(frozen=True)
class StopAfter(Callback):
    """Stops a run after some rounds, also in the middle of a cycle; it counts them itself."""

    rounds: int = 5

    def initial_state(self) -> Tree:
        return Count(torch.tensor(0))

    def on_round_end(self, run: RunView, state: Tree) -> Tree:
        count = int(state.rounds) + 1
        if count == self.rounds:
            run.stop_run(f"{count} rounds are enough")
        return Count(torch.tensor(count))


def test_a_callback_may_stop_in_the_middle_of_a_cycle() -> None:
    """The round in which it stops is evaluated, although its cycle is not over."""
    check_callback(StopAfter(5))
    outcome = train_run(StopAfter(5))
    assert [record["round"] for record in outcome.records] == [2, 4]
    assert outcome.notes == {"stopped_early": "5 rounds are enough"}


@dataclass(frozen=True)
class Forgetful(StopAfter):
    """Counts in itself instead of in its state."""

    seen: list[int] = field(default_factory=list, hash=False, compare=False)

    def on_round_end(self, run: RunView, state: Tree) -> Tree:
        self.seen.append(1)
        if len(self.seen) == self.rounds:
            run.stop_run("enough")
        return state


@dataclass(frozen=True)
class Stateless(StopAfter):
    """Forgets to return its state."""

    def on_round_end(self, run: RunView, state: Tree) -> None:
        pass


@dataclass(frozen=True)
class Plain(StopAfter):
    """Its state is a number, which is no tensor."""

    def initial_state(self) -> Tree:
        return (0,)


@dataclass(frozen=True)
class Meddling(Callback):
    """Changes the state from which training goes on."""

    def on_evaluation(self, run: RunView, state: Tree) -> None:
        tree_map(lambda leaf: leaf.mul_(1.1), run.round.state.server.shared)


def test_the_suite_notices_a_mistake() -> None:
    with pytest.raises(AssertionError, match="the records differ"):
        check_callback(Forgetful(11))
    with pytest.raises(ValueError, match="a hook of callback Stateless-1 has returned None; it must return"):
        check_callback(Stateless())
    with pytest.raises(AssertionError, match=r"the initial state is \(0,\); it must be a tensor"):
        check_callback(Plain())
    with pytest.raises(AssertionError, match="differ from those without the callback"):
        check_callback(Meddling())
