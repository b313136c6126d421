"""Trackio: a run in a local database, which `trackio show` draws."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fedauc.experiments.callbacks._tracker import Tracker, TrackerSession, name_run, select_numbers
from fedauc.fields import option

if TYPE_CHECKING:
    from fedauc.experiments.run_view import RunView


class TrackioRun(TrackerSession):
    """A run of `trackio`, which finds it again by its name."""

    def __init__(self, run: Any) -> None:
        self._run, self.run_id = run, str(run.name)

    def log_record(self, record: Mapping[str, Any]) -> None:
        """One metric per number, with the round as its step."""
        self._run.log(select_numbers(record), step=record["round"])

    def log_result(self, record: Mapping[str, Any], files: Sequence[Path]) -> None:
        """The final numbers as metrics `final/...`, and the files as an artifact of type model."""
        import trackio

        numbers = {f"final/{name}": value for name, value in select_numbers(record).items()}
        self._run.log(numbers, step=record.get("round"))
        artifact = trackio.Artifact(f"model-{self.run_id}", type="model")
        for file in files:
            artifact.add_file(str(file))
        self._run.log_artifact(artifact)

    def close(self, failure: str | None) -> None:
        """Write what is left."""
        if failure is not None:
            self._run.log({"stopped": 1.0})
        self.pause()

    def pause(self) -> None:
        """Write what is left; a resumed run goes on under its name."""
        with redirect_stdout(sys.stderr):
            self._run.finish()


@dataclass(frozen=True)
class Trackio(Tracker):
    """Logs parameters, metrics, the result and the model to Trackio on this machine."""

    name: ClassVar[str] = "trackio"
    needs_packages: ClassVar[tuple[str, ...]] = ("trackio",)
    project: str = option("fedauc", "Project that the run belongs to.")

    def open_session(self, run: RunView, run_id: str | None, earlier: Sequence[Mapping[str, Any]]) -> TrackioRun:
        """A new run with a name of its own, or the run of an earlier process."""
        import trackio

        name = run_id or f"{name_run(run)}-{uuid.uuid4().hex[:8]}"
        # Its greetings are no output of the command.
        with redirect_stdout(sys.stderr):
            resume = "never" if run_id is None else "allow"
            started = trackio.init(self.project, name=name, config=dict(run.parameters), resume=resume, embed=False)
        # It would end this run when the next one of a sweep starts.
        trackio.context_vars.current_run.set(None)
        return TrackioRun(started)
