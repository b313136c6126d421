"""What trackers share: a run in a tracking tool is opened once, goes on after a resume, and never stops training.

A tracker is a callback with one more method, `open_session`. The identifier of its run in the tool is kept in
`tracker-NAME.json` in the run folder, so that a resumed run goes on there, and with it the last round that was sent, so
that no round is sent twice. An error of the tool is a warning, and the run goes on without the tracker.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import getstate, setstate
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fedauc.experiments.callbacks.callback import Callback
from fedauc.files import write_atomically

if TYPE_CHECKING:
    from fedauc.experiments.run_view import RunView
    from fedauc.trees import Tree


ATTENDANCE = ("visits", "absences", "floats_down", "floats_up", "bytes_down", "bytes_up")
"""The columns of a record that say how many clients came."""


class TrackerSession(ABC):
    """One run in a tracking tool, open for writing. `run_id` is what the tool finds it by."""

    run_id: str

    drops_later_rounds: ClassVar[bool] = False
    """Whether opening it removes the rounds after the checkpoint of a resumed run, which are then sent again."""

    @abstractmethod
    def log_record(self, record: Mapping[str, Any]) -> None:
        """Log the record of one evaluation; its column `round` says which."""

    @abstractmethod
    def log_result(self, record: Mapping[str, Any], files: Sequence[Path]) -> None:
        """Log the record of the model that the run ends with, and store the files, which are deleted afterwards."""

    @abstractmethod
    def close(self, failure: str | None) -> None:
        """End the session; `failure` says why training had to be stopped."""

    def pause(self) -> None:
        """Write what is left: the run is paused or interrupted, and may go on in another process."""
        return


@dataclass
class _OpenSession:
    """A session with the last round that was sent; `session` is None once the tool has failed."""

    session: TrackerSession | None
    last_round: int

    def close(self) -> None:
        """Pause the session; by now the run is saved, and an error of the tool must not hide how it goes on."""
        if self.session is not None:
            with suppress(Exception):
                self.session.pause()


@dataclass(frozen=True)
class Tracker(Callback):
    """Sends parameters, metrics, bytes, the result and the model of a run to a tracking tool."""

    def open_session(self, run: RunView, run_id: str | None, earlier: Sequence[Mapping[str, Any]]) -> TrackerSession:
        """Open a new run in the tool and log its parameters, or go on with the run of that identifier.

        `earlier` are the records up to the checkpoint from which a resumed run goes on.
        """
        raise NotImplementedError(f"{type(self).__name__} must define open_session")

    def on_evaluation(self, run: RunView, state: Tree) -> None:
        """Send the record of the evaluation."""
        record = select_columns(run, run.records[-1])

        def send_record(session: TrackerSession) -> None:
            session.log_record(record)
            self._store_id(run, session.run_id, record["round"])

        self._use_session(run, send_record, len(run.records) - 1)

    def on_finish(self, run: RunView, state: Tree) -> None:
        """Send the result and the model, and close the run in the tool."""

        def send_result(session: TrackerSession) -> None:
            with tempfile.TemporaryDirectory() as scratch:
                model = Path(scratch) / "model.pt"
                torch.save(run.build_final_module().state_dict(), model)
                description = write_json(Path(scratch) / "parameters.json", run.parameters)
                session.log_result(select_columns(run, run.final_record or {}), [model, description])
            session.close(None)

        self._use_session(run, send_result, len(run.records))

    def on_failure(self, run: RunView, state: Tree, reason: str) -> None:
        """Close the run in the tool as one that has failed."""
        self._use_session(run, lambda session: session.close(reason), len(run.records))

    def _use_session(self, run: RunView, use: Callable[[TrackerSession], None], earlier: int) -> None:
        """Do something with the run's session, which is opened first where that is due; errors are warnings.

        So many records are there from earlier; the one after them, if any, is to be sent unless that was done before.
        """
        # The command line lists callbacks without importing torch.
        from fedauc.experiments.ranks import is_first_rank

        if not is_first_rank():
            return
        generator = getstate()
        key, opened = f"tracker-{self.name}", run.live_objects.get(f"tracker-{self.name}")
        try:
            if opened is None:
                run_id, last_round = self._read_id(run)
                records = [select_columns(run, record) for record in run.records[:earlier]]
                session = self.open_session(run, run_id, records)
                opened = _OpenSession(session, -1 if session.drops_later_rounds else last_round)
                run.live_objects[key] = opened
            is_sent = any(record["round"] <= opened.last_round for record in run.records[earlier:])
            if opened.session is not None and not is_sent:
                use(opened.session)
        except Exception as error:
            run.live_objects[key] = _OpenSession(None, -1)
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            logging.getLogger("fedauc").warning("the run goes on without the callback %r: %s", self.name, reason)
        finally:
            # Tools draw names from Python's global generator, and the user's own draws must not notice.
            setstate(generator)

    def _id_file(self, run: RunView) -> Path | None:
        return None if run.folder is None else run.folder / f"tracker-{self.name}.json"

    def _read_id(self, run: RunView) -> tuple[str | None, int]:
        """The run's identifier in the tool and the last round that was sent; None and -1 for a new run."""
        path = self._id_file(run)
        if path is None or not path.is_file():
            return None, -1
        stored = json.loads(path.read_text())
        return str(stored["id"]), int(stored["round"])

    def _store_id(self, run: RunView, run_id: str, round: int) -> None:
        path = self._id_file(run)
        if path is not None:
            write_atomically(path, json.dumps({"id": run_id, "round": round}).encode())


def select_columns(run: RunView, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record as it may leave the run folder: without how many clients came, where these are private."""
    return {name: value for name, value in record.items() if not run.hides_clients or name not in ATTENDANCE}


def select_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record, which is what tracking tools can draw.

    >>> select_numbers({"round": 3, "auc": 0.9, "loss": None, "alpha": float("nan")})
    {'round': 3, 'auc': 0.9}
    """
    return {name: value for name, value in record.items() if isinstance(value, (int, float)) and math.isfinite(value)}


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Write a small file, and return its path."""
    path.write_text(json.dumps(content, indent=2, default=repr) + "\n")
    return path


def name_run(run: RunView) -> str:
    """How a run is called in a tool: its folder, with its parents where it is one of several runs."""
    if run.folder is None:
        return "fit"
    parts = run.folder.absolute().parts
    return "-".join(parts[-3:]) if parts[-1].startswith("seed-") else parts[-1]
