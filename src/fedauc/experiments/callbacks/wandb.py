"""Weights & Biases: a run that is kept on this machine until `wandb sync` sends it, unless another mode is set."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fedauc.experiments.callbacks._tracker import Tracker, TrackerSession, name_run, select_numbers
from fedauc.fields import option

if TYPE_CHECKING:
    from fedauc.experiments.run_view import RunView


class WandbRun(TrackerSession):
    """A run of `wandb`; its steps are rounds."""

    def __init__(self, run: Any) -> None:
        self._run, self.run_id = run, str(run.id)

    def log_record(self, record: Mapping[str, Any]) -> None:
        """One metric per number."""
        self._run.log(select_numbers(record), step=record["round"])

    def log_result(self, record: Mapping[str, Any], files: Sequence[Path]) -> None:
        """The final numbers in the summary, and the files as an artifact of type model."""
        import wandb

        self._run.summary.update({f"final/{name}": value for name, value in select_numbers(record).items()})
        artifact = wandb.Artifact(f"model-{self.run_id}", type="model")
        for file in files:
            artifact.add_file(str(file))
        self._run.log_artifact(artifact)

    def close(self, failure: str | None) -> None:
        """End the run; a failed one has exit code 1."""
        if failure is not None:
            self._run.summary["stopped"] = failure
        self._run.finish(exit_code=0 if failure is None else 1)

    def pause(self) -> None:
        """End the part of the run that this process has written; `wandb sync` joins the parts."""
        self._run.finish(exit_code=0)


@dataclass(frozen=True)
class Wandb(Tracker):
    """Logs parameters, metrics, the result and the model to Weights & Biases, offline unless a mode is set."""

    name: ClassVar[str] = "wandb"
    needs_packages: ClassVar[tuple[str, ...]] = ("wandb",)
    project: str = option("fedauc", "Project that the run belongs to.")
    mode: Literal["", "online", "offline", "shared"] = option(
        "", "Whether the run is sent at once; the environment variable WANDB_MODE or offline by default."
    )

    def open_session(self, run: RunView, run_id: str | None, earlier: Sequence[Mapping[str, Any]]) -> WandbRun:
        """A new run, or one that goes on with the identifier of an earlier process."""
        import wandb

        mode: Any = self.mode or os.environ.get("WANDB_MODE") or "offline"
        started = wandb.init(
            project=self.project,
            name=name_run(run),
            id=run_id,
            resume=None if run_id is None else "allow",
            mode=mode,
            dir=str(run.folder or Path()),
            config=dict(run.parameters),
            # Several runs may be trained in one process, and each has a run of its own here.
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )
        return WandbRun(started)
