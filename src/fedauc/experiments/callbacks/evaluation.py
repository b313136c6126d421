"""Evaluation: measure the model at the end of a cycle, and make a record of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedauc.experiments.callbacks.callback import Callback
from fedauc.fields import describe, option

if TYPE_CHECKING:
    from fedauc.experiments.run_view import RunView
    from fedauc.interfaces import Phase
    from fedauc.trees import Tree


def is_evaluation_due(phase: Phase, every: int, is_last: bool) -> bool:
    """Whether the model is evaluated after a round: every so many learning cycles, and after the last round."""
    return is_last or (phase.ends_cycle and not phase.scoring and phase.learning_cycles % every == 0)


@dataclass(frozen=True)
class Evaluation(Callback):
    """Measures the model every so many learning cycles and after the last round; None means that there is no record.

    The last round may be one in which another callback has stopped the run.
    """

    measure: Callable[[RunView], Mapping[str, Any] | None] = field(
        metadata=describe("Measures the model, and returns the columns of quality.")
    )
    every: int = option(1, "Cycles between evaluations.", at_least=1)

    def evaluate_round(self, run: RunView, state: Tree) -> None:
        """Evaluate where that is due."""
        is_due = is_evaluation_due(run.round.phase, self.every, run.is_over)
        if is_due and (columns := self.measure(run)) is not None:
            run.add_record(columns)
