"""What a callback sees of a run, and what it may ask of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedauc.data.clients import Examples
from fedauc.experiments.evaluation import score_rows
from fedauc.interfaces import Model
from fedauc.training import Round
from fedauc.trees import tree_map

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedauc.experiments.run_loop import RunLoop


GAIN = "_gain"
"""The end of the name of a column with the gain over the best record so far. A record has it where its value alone says
too little, because it was measured on other rows."""


class RunView:
    """A run as its callbacks see it."""

    def __init__(self, loop: RunLoop) -> None:
        self._loop = loop

    # ------------------------------------------------------------------------------------------------- how far it is

    @property
    def round(self) -> Round:
        """The last round of this process: phase, cohort, loss, diagnostics, traffic, and the state after it.

        Training goes on from that state, so its tensors must not be changed in place; `model` is a copy.
        """
        if self._loop.last_round is None:
            raise ValueError("no round has finished since the run was resumed; use rounds_done and records instead")
        return self._loop.last_round

    @property
    def rounds_done(self) -> int:
        """How many rounds are done."""
        return self._loop.state.round

    @property
    def hides_clients(self) -> bool:
        """Whether the run promises its clients privacy: then how many came must not leave the run folder."""
        account = self._loop.training.account
        return self._loop.training.is_private and account is not None and account.unit == "client"

    @property
    def total_rounds(self) -> int:
        """The rounds of the whole run, if nothing stops it."""
        return self._loop.training.plan.total_rounds

    @property
    def is_over(self) -> bool:
        """Whether this round is the last one, by the plan or because a callback has stopped the run."""
        return self._loop.is_over

    @property
    def seconds(self) -> float:
        """Seconds of training and evaluation so far, over all processes that worked on the run."""
        return self._loop.elapsed_seconds()

    @property
    def folder(self) -> Path | None:
        """The run folder; None for `fit`."""
        return self._loop.folder.path if self._loop.folder else None

    # --------------------------------------------------------------------------------------------------- how good it is

    @property
    def records(self) -> Sequence[Mapping[str, Any]]:
        """The records so far, in the order of `records.jsonl`."""
        return tuple(self._loop.records)

    @property
    def metric_columns(self) -> tuple[str, ...]:
        """The columns of the metrics' values in a record, those of the test rows first."""
        return self._loop.columns.values

    @property
    def metric_names(self) -> tuple[str, ...]:
        """What the values of `metric_columns` are called on a screen, such as `ap` for `average_precision`."""
        return self._loop.columns.names

    @property
    def validation_column(self) -> str:
        """The column by which rounds are compared: the first metric on the validation rows."""
        column = self._loop.columns.validation
        if column is None:
            raise ValueError(
                "the run has no validation rows to choose a round by; give some, or leave the callback out"
            )
        return column

    def is_better_than(self, best: float) -> bool:
        """Whether the last record is better than the best one before it, whose value on the validation rows is `best`.

        A record that has a gain says itself how much better it is; without a number there is nothing to compare with,
        and the comparisons begin anew.
        """
        record, column = self.records[-1], self.validation_column
        value, gain = record[column], record.get(f"{column}{GAIN}")
        # Noise can hide the value of a private evaluation, and in a federation nobody may have answered.
        if value is None:
            return False
        if f"{column}{GAIN}" in record:
            return gain is None or bool(gain > 0)
        return bool(value > best)

    @property
    def final_record(self) -> Mapping[str, Any] | None:
        """From `on_finish`: the record of the model that the run ends with, if that model was evaluated."""
        return self._loop.describe_end().record

    @property
    def parameters(self) -> Mapping[str, Any]:
        """What describes the run: the fields of its configuration by their paths, such as `recipe.learning_rate`."""
        return self._loop.parameters

    # ------------------------------------------------------------------------------------------------- model and data

    @property
    def model(self) -> Model:
        """A copy of the model that is evaluated after this round, as flat vectors; changing it changes no training."""
        model: Model = tree_map(torch.clone, self._loop.evaluated_model())
        return model

    def build_module(self) -> nn.Module:
        """A copy of the module with the weights of `model`."""
        return self._loop.network.build_module(self._loop.evaluated_model())

    def build_final_module(self) -> nn.Module:
        """From `on_finish`: a copy of the module with the weights that the run ends with."""
        return self._loop.network.build_module(self._loop.describe_end().model)

    def score_rows(self, inputs: Tensor) -> np.ndarray:
        """The scores of `model` for rows, in float64: raw outputs, or of several classes the log-odds of each."""
        objective = self._loop.training.algorithm.objective
        return score_rows(self._loop.network, self._loop.evaluated_model(), inputs, objective)

    @property
    def client_count(self) -> int:
        """The number of clients."""
        return len(self._loop.training.setting.census.positives)

    def client_examples(self, client: int) -> Examples:
        """A copy of one client's training rows. A federation's server holds no rows and refuses."""
        clients = self._loop.clients
        if clients is None:
            raise ValueError(f"client is {client}, but its rows are at its site; only a simulation can show them")
        rows = np.concatenate([clients.positives(client), clients.negatives(client)])
        return Examples(clients.inputs[rows], clients.labels[rows])

    # ----------------------------------------------------------------------------------------------------- what to do

    @property
    def live_objects(self) -> dict[str, Any]:
        """Room for what a checkpoint cannot hold, such as an open connection, under a name of the callback's own.

        One callback may serve several runs of a sweep, so it must not keep such objects in itself. When a run is paused
        or interrupted, those that have a method `close` are closed.
        """
        return self._loop.live_objects

    def add_record(self, columns: Mapping[str, Any]) -> None:
        """Make a record of this round with these columns of quality."""
        self._loop.add_record(columns)

    def stop_run(self, reason: str) -> None:
        """End the run after this round. It ends as usual, and its result gives the reason."""
        self._loop.stop_reason = self._loop.stop_reason or reason

    def choose_model(self, model: Model, round: int) -> None:
        """From `on_finish`: let the run end with this model of an earlier round instead of its last one."""
        self._loop.chosen_model = model, round
