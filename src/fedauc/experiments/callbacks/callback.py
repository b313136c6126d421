"""What a callback is: something that happens beside training, after rounds and evaluations.

After every round the run loop (`experiments/run_loop.py`) calls the callbacks in order:

    on_round_end     after each round
    evaluate_round   then the evaluation measures the model, where that is due, and makes a record
    on_evaluation    if a record was made
    on_checkpoint    just before the run is saved, where that is due

and at the end `on_finish`, or `on_failure` where training had to be stopped. A callback is a frozen dataclass, as every
configuration is. What it remembers from round to round is its state, a tree of tensors that each hook receives and
returns. The run loop stores it in the checkpoints, so that a resumed run goes on where it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedauc.fields import check_fields

if TYPE_CHECKING:
    from fedauc.experiments.run_view import RunView
    from fedauc.trees import Tree


@dataclass(frozen=True)
class Callback:
    """Something that happens beside training. A subclass defines the hooks that it needs.

    A hook returns the new state; a callback without state may return nothing. Under torchrun every rank calls the
    hooks, with a folder of its own, and rank 0 decides whether the run ends early.
    """

    name: ClassVar[str]
    """By which a configuration names the callback; without a name it can only be passed in Python."""

    needs_validation: ClassVar[bool] = False
    """Whether the callback compares rounds by the validation rows; a run without such rows refuses it."""

    needs_packages: ClassVar[tuple[str, ...]] = ()
    """Packages that must be installed for the callback; a run without them is refused."""

    def __post_init__(self) -> None:
        check_fields(self)

    def initial_state(self) -> Tree:
        """The state before the first round: a tensor, or a named tuple of tensors; `()` for none."""
        return ()

    def on_round_end(self, run: RunView, state: Tree) -> Tree | None:
        """After a round, before its evaluation."""
        return state

    def evaluate_round(self, run: RunView, state: Tree) -> Tree | None:
        """After `on_round_end` of all callbacks: make a record with `run.add_record`, where one is due."""
        return state

    def on_evaluation(self, run: RunView, state: Tree) -> Tree | None:
        """After an evaluation; its record is the last of `run.records`."""
        return state

    def on_checkpoint(self, run: RunView, state: Tree) -> Tree | None:
        """Before the run is saved, together with the state that this returns."""
        return state

    def on_finish(self, run: RunView, state: Tree) -> None:
        """When the run has come to its end, before the result is written; again, if a run is resumed there."""

    def on_failure(self, run: RunView, state: Tree, reason: str) -> None:
        """When training had to be stopped, for example because it diverged."""
