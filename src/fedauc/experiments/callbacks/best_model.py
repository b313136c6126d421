"""Best-model keeping: the run ends with the model of its best evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from fedauc.experiments.callbacks.callback import Callback
from fedauc.trees import is_empty

if TYPE_CHECKING:
    from torch import Tensor

    from fedauc.experiments.run_view import RunView
    from fedauc.trees import Tree


class Best(NamedTuple):
    """The best value so far, the round it was measured after, and the model of that round."""

    value: Tensor
    round: Tensor
    model: Tree


@dataclass(frozen=True)
class BestModel(Callback):
    """Keeps the model with the highest value of the validation metric, the first of equals, and ends the run with it.

    The field `keep="best"` of a recipe adds this callback.
    """

    name: ClassVar[str] = "best-model"
    needs_validation: ClassVar[bool] = True

    def on_evaluation(self, run: RunView, state: Tree) -> Tree:
        """Keep a better model."""
        value = run.records[-1][run.validation_column]
        value = -math.inf if value is None else value
        best = -math.inf if is_empty(state) else state.value.item()
        # Until an evaluation has a value, nothing speaks for an earlier model.
        if best > -math.inf and not run.is_better_than(best):
            return state
        return Best(torch.tensor(value, dtype=torch.float64), torch.tensor(run.round.phase.round), run.model)

    def on_finish(self, run: RunView, state: Tree) -> None:
        """Let the run end with the best model."""
        run.choose_model(state.model, int(state.round))
