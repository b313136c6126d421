"""MLflow: a run in a tracking server or in a local database."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fedauc.experiments.callbacks._tracker import Tracker, TrackerSession, name_run, select_numbers
from fedauc.fields import option

if TYPE_CHECKING:
    from fedauc.experiments.run_view import RunView

DEFAULT_URI = "sqlite:///mlflow.db"
"""A database in the current folder, as `mlflow ui` and `mlflow server` expect it."""

PARAMETERS_PER_CALL = 100
"""What a tracking server accepts at once."""


class MLflowRun(TrackerSession):
    """A run of an MLflow experiment, through a client of its own: the global state of `mlflow` stays as it is."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self.run_id = client, run_id

    def log_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Log parameters as texts, as many at once as a server takes."""
        from mlflow.entities import Param

        items = [Param(clean_name(name), str(value)) for name, value in parameters.items()]
        for start in range(0, len(items), PARAMETERS_PER_CALL):
            self._client.log_batch(self.run_id, params=items[start : start + PARAMETERS_PER_CALL])

    def log_record(self, record: Mapping[str, Any], prefix: str = "") -> None:
        """One metric per number, with the round as its step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        numbers = select_numbers(record).items()
        metrics = [Metric(clean_name(prefix + name), value, now, record["round"]) for name, value in numbers]
        self._client.log_batch(self.run_id, metrics=metrics)

    def log_result(self, record: Mapping[str, Any], files: Sequence[Path]) -> None:
        """The final numbers as metrics `final/...`, and the files as artifacts."""
        if record:
            self.log_record(record, prefix="final/")
        for file in files:
            self._client.log_artifact(self.run_id, str(file))

    def close(self, failure: str | None) -> None:
        """Mark the run as finished or failed."""
        if failure is not None:
            self._client.set_tag(self.run_id, "stopped", failure)
        self._client.set_terminated(self.run_id, "FINISHED" if failure is None else "FAILED")


@dataclass(frozen=True)
class MLflow(Tracker):
    """Logs parameters, metrics, the result and the model to MLflow."""

    name: ClassVar[str] = "mlflow"
    needs_packages: ClassVar[tuple[str, ...]] = ("mlflow",)
    uri: str = option("", "Tracking server or database; MLFLOW_TRACKING_URI or sqlite:///mlflow.db by default.")
    experiment: str = option("fedauc", "Experiment that the run belongs to; it is made where it is missing.")

    def open_session(self, run: RunView, run_id: str | None, earlier: Sequence[Mapping[str, Any]]) -> MLflowRun:
        """A new run with its parameters, or the run of an earlier process, which is marked as running again."""
        from mlflow import MlflowClient

        client = MlflowClient(self.uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI)
        if run_id is not None:
            client.update_run(run_id, status="RUNNING")
            return MLflowRun(client, run_id)
        known = client.get_experiment_by_name(self.experiment)
        experiment = client.create_experiment(self.experiment) if known is None else known.experiment_id
        session = MLflowRun(client, client.create_run(experiment, run_name=name_run(run)).info.run_id)
        session.log_parameters(run.parameters)
        return session


def clean_name(name: str) -> str:
    """A name that MLflow accepts.

    >>> clean_name("tpauc@0.3:0.4")
    'tpauc_0.3_0.4'
    """
    return re.sub(r"[^\w./ -]", "_", name)
