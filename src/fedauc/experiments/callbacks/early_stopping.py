"""Early stopping: end the run when the validation rows show no progress."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from fedauc.experiments.callbacks.callback import Callback
from fedauc.fields import option

if TYPE_CHECKING:
    from torch import Tensor

    from fedauc.experiments.run_view import RunView
    from fedauc.trees import Tree


class Waiting(NamedTuple):
    """The best value so far, and how many evaluations have passed since then."""

    best: Tensor
    evaluations: Tensor


@dataclass(frozen=True)
class EarlyStopping(Callback):
    """Stops the run after so many evaluations in a row without a new best value of the validation metric.

    The field `patience` of a recipe adds this callback.
    """

    name: ClassVar[str] = "early-stopping"
    needs_validation: ClassVar[bool] = True
    patience: int = option(5, "Evaluations without a new best value.", at_least=1)

    def initial_state(self) -> Tree:
        """Any first value is the best."""
        return Waiting(torch.tensor(-math.inf, dtype=torch.float64), torch.tensor(0))

    def on_evaluation(self, run: RunView, state: Tree) -> Tree:
        """Count, and stop the run when the patience is used up; an evaluation without validation rows says nothing."""
        column = run.validation_column
        value = run.records[-1][column]
        if value is None:
            return state
        if run.is_better_than(state.best.item()):
            return Waiting(torch.tensor(value, dtype=torch.float64), torch.tensor(0))
        waited = int(state.evaluations) + 1
        if waited >= self.patience:
            evaluations = "1 evaluation" if waited == 1 else f"{waited} evaluations"
            best = state.best.item()
            if math.isinf(best):
                run.stop_run(f"{column} has been NaN or -inf for {evaluations}")
            else:
                not_a_number = "is NaN and " if math.isnan(value) else ""
                run.stop_run(f"{column} {not_a_number}has not risen above {best:.6g} for {evaluations}")
        return state._replace(evaluations=torch.tensor(waited))
