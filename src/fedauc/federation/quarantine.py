"""Sites that the server no longer asks, because it has refused too many of their answers for what these held.

A site that is offline, late, has lost its state, or says itself that it does not answer has done nothing wrong. What
counts is an answer that the server refuses after looking into it. Whether a site is asked depends on its own answers
and on the operator alone. The state is part of every checkpoint, so that a resumed run decides the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedauc.experiments.folder import RunFolder
from fedauc.federation.agreement import ServerPolicy
from fedauc.federation.exchange import LOG
from fedauc.files import write_atomically
from fedauc.interfaces import Cohort

QUARANTINE_FILE = "quarantine.jsonl"
"""A line for every site that is put in quarantine or released, in a run's folder."""

RELEASES_FILE = "releases.json"
"""The names of the sites that the operator has released, in a run's folder; a name once for every release."""

NEVER_AGAIN = 2**62
"""The round from which a site is asked again that is in quarantine for the rest of the run."""


class QuarantineState(NamedTuple):
    """Per client, the refusals that count, and the round from which it is asked again; 0 if it is in no quarantine.

    `releases` is how many of the operator's releases have been carried out.
    """

    refusals: Tensor
    asked_from: Tensor
    releases: Tensor


class Quarantine:
    """Counts refusals per site, and says which sites are not asked.

    With a run's folder, what happens is a line of its file quarantine.jsonl, and the operator can release sites there.
    """

    def __init__(self, policy: ServerPolicy, names: Sequence[str], cycle_length: int) -> None:
        self._policy, self._names, self._cycle_length = policy, list(names), cycle_length
        counts = torch.zeros(len(self._names), dtype=torch.int64)
        self.state = QuarantineState(counts, counts.clone(), torch.tensor(0))
        self._folder: RunFolder | None = None

    def attach_folder(self, folder: RunFolder) -> None:
        """Write to this folder from now on, and read releases from it."""
        self._folder = folder

    def restore_state(self, state: QuarantineState) -> None:
        """Go on from the state of a checkpoint; sites that have joined since then have the last numbers."""
        refusals, asked_from = self.state.refusals.clone(), self.state.asked_from.clone()
        refusals[: len(state.refusals)], asked_from[: len(state.asked_from)] = state.refusals, state.asked_from
        self.state = QuarantineState(refusals, asked_from, state.releases)

    def exclude_sites(self, cohort: Cohort) -> dict[int, str]:
        """Begin a round: the clients of the cohort that are not asked, and why.

        Those whose time is over, or whom the operator has released, are asked again.
        """
        requested = [] if self._folder is None else read_releases(self._folder.path)
        # A shorter list than before was begun anew, as the error about a damaged one advises.
        known = int(self.state.releases)
        new_requests = requested[known:] if known <= len(requested) else requested
        for client, first in enumerate(self.state.asked_from.tolist()):
            is_pardoned = self._names[client] in new_requests
            if 0 < first <= cohort.round or is_pardoned:
                self._release(
                    client, cohort.round, "the operator has released it" if is_pardoned else "its time is over"
                )
        self.state = self.state._replace(releases=torch.tensor(len(requested)))
        return self.list_excluded(cohort.clients)

    def list_excluded(self, clients: Iterable[int]) -> dict[int, str]:
        """Those of some clients that are not asked, and until when."""
        until = self.state.asked_from.tolist()
        return {client: f"is in quarantine {_describe_end(until[client])}" for client in clients if until[client] > 0}

    def count_refusals(self, refused: Mapping[int, str], round: int) -> None:
        """Count refused answers, and put sites in quarantine that have had too many."""
        for client, reason in sorted(refused.items()):
            refusals, asked_from = self.state.refusals.clone(), self.state.asked_from.clone()
            refusals[client] += 1
            is_new = 0 < self._policy.quarantine_after <= int(refusals[client]) and asked_from[client] == 0
            if is_new:
                cycles = self._policy.quarantine_cycles
                asked_from[client] = NEVER_AGAIN if cycles is None else round + 1 + cycles * self._cycle_length
            self.state = self.state._replace(refusals=refusals, asked_from=asked_from)
            if is_new:
                end = _describe_end(int(asked_from[client]))
                why = f"{int(refusals[client])} of its answers were refused, the last one because {reason}"
                self._note(client, round, "quarantined", f"is in quarantine {end}: {why}")

    def _release(self, client: int, round: int, reason: str) -> None:
        refusals, asked_from = self.state.refusals.clone(), self.state.asked_from.clone()
        was_excluded = asked_from[client] > 0
        refusals[client] = asked_from[client] = 0
        self.state = self.state._replace(refusals=refusals, asked_from=asked_from)
        if was_excluded:
            self._note(client, round, "released", f"is no longer in quarantine: {reason}")

    def _note(self, client: int, round: int, event: str, text: str) -> None:
        LOG.warning("site %r %s", self._names[client], text)
        if self._folder is not None:
            line = {"round": round, "site": self._names[client], "event": event, "text": text}
            self._folder.append_line(QUARANTINE_FILE, line)


def request_release(folder: Path, name: str, names: Sequence[str]) -> None:
    """Write down that the operator releases a site; the server reads it before its next round, or when it resumes."""
    if name not in names:
        raise ValueError(f"site is {name!r}, which is no site of {folder}; its sites are {', '.join(names)}")
    write_atomically(folder / RELEASES_FILE, f"{json.dumps([*read_releases(folder), name])}\n".encode())


def read_releases(folder: Path) -> list[str]:
    """The names that `request_release` has written; none where there is no file."""
    path = folder / RELEASES_FILE
    if not path.is_file():
        return []
    try:
        names: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; delete it, and release the sites again") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path} is damaged: it must be a list of names; delete it, and release the sites again")
    return names


def list_quarantined(folder: RunFolder) -> dict[str, str]:
    """The sites that are in quarantine after the last round of a run, and why."""
    events = {line["site"]: line for line in folder.read_lines(QUARANTINE_FILE)}
    return {name: line["text"] for name, line in sorted(events.items()) if line["event"] == "quarantined"}


def _describe_end(asked_from: int) -> str:
    # Rounds count from 0 in files, and from 1 where people read them.
    return "for the rest of the run" if asked_from == NEVER_AGAIN else f"until round {asked_from + 1}"
