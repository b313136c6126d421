"""Callbacks at a federation's server: they may stop the run, survive a restart, and see no client's rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

import fedauc
from fedauc.experiments.callbacks import Callback
from fedauc.experiments.callbacks.early_stopping import EarlyStopping
from fedauc.experiments.run_view import RunView
from fedauc.federation.run_config import read_run_config
from fedauc.trees import Tree
from federation.memory_grid import collect_rounds, create_run, make_agreement, make_grid, resume_run
from small_federations import held_out


class Evaluations(NamedTuple):
    done: Tensor


@dataclass(frozen=True)
class StopAfterEvaluations(Callback):
    """Stops after some evaluations."""

    name: ClassVar[str] = "stop-after-evaluations"
    evaluations: int = 2

    def initial_state(self) -> Tree:
        return Evaluations(torch.tensor(0))

    def on_evaluation(self, run: RunView, state: Tree) -> Tree:
        with pytest.raises(ValueError, match="its rows are at its site; only a simulation can show them"):
            run.client_examples(0)
        if int(state.done) + 1 == self.evaluations:
            run.stop_run(f"{self.evaluations} evaluations are enough")
        return Evaluations(state.done + 1)


class Killed(Exception):
    """Stands for a server that is killed."""


def test_a_callback_stops_a_federated_run_also_after_a_restart(tmp_path: Path) -> None:
    """Eight cycles were planned; the server is killed after every round and resumed."""
    fedauc.register(StopAfterEvaluations)
    agreement = make_agreement("cycp-minimax", {"evaluation": "histograms"}, participation="cyclic", cycles=8)
    agreement = replace(agreement, callbacks=(StopAfterEvaluations(),))
    alone = create_run(agreement, make_grid(tmp_path / "one", test=held_out()), tmp_path / "alone")
    result = alone.train_to_end()
    assert result["stopped_early"] == "2 evaluations are enough"
    assert len(alone.folder.read_records()) == 2
    assert result["final"] == alone.folder.read_records()[-1]

    grid, out = make_grid(tmp_path / "two", test=held_out()), tmp_path / "run"
    create_run(agreement, grid, out)

    def kill(finished: object) -> None:
        raise Killed

    for _ in range(20):
        run = resume_run(agreement, grid, out)
        try:
            collect_rounds(run, [], kill)
            break
        except Killed:
            continue
    for name in ("records.jsonl", "attendance.jsonl", "result.json"):
        assert (out / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def test_a_federation_refuses_what_chooses_by_held_out_rows() -> None:
    with pytest.raises(ValueError, match="keep is 'best', but there are no validation rows to compare rounds by"):
        make_agreement("cycp-minimax", keep="best")
    with pytest.raises(ValueError, match="which needs validation rows"):
        replace(make_agreement("cycp-minimax"), callbacks=(EarlyStopping(2),))


def test_the_run_configuration_takes_callbacks_and_refuses_metrics() -> None:
    sites = make_agreement("cycp-minimax").sites
    config = {"method": "cycp-minimax", "options": "callbacks=progress-line callbacks.progress-line.every=2"}
    (callback,) = read_run_config(config, sites).callbacks
    assert repr(callback) == "ProgressLine(every=2)"
    with pytest.raises(ValueError, match="metrics is 'pauc', but the sites prepare their data themselves"):
        read_run_config({"method": "cycp-minimax", "metrics": "pauc"}, sites)
