"""A federation as the person sees it who runs it: what the server waits for, and who has answered, when and why not.

Everything is read from the run's folder. It is shown by `fedauc board` and not in a report, which others may read.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedauc.federation.delivery import DELIVERY_FILE
from fedauc.federation.registration import CENSUS_FILE
from fedauc.federation.round_status import ROUND_TIMES_FILE, read_status
from fedauc.federation.server import ATTENDANCE_FILE, UNAVAILABLE
from fedauc.reports.figures import Axis, Cells, Figure, Layer, Line, Points
from fedauc.reports.report_runs import ReportRun
from fedauc.reports.report_tables import Cell, ReportTable
from fedauc.reports.sentences import format_seconds

MAX_ROUNDS = 200
"""Figures and tables of more rounds show the last ones."""

MAX_SITES = 60
"""Of more sites the attendance shows those that missed most rounds."""

MISSED_ROUNDS = 3
"""A site that was due and missing in so many rounds in a row is named at the top."""

NOT_ASKED, ANSWERED, UNUSED, ABSENT, REFUSED, UNEXPECTED = range(6)

CELL_COLOURS = ("empty", "series2", "series4", "absent", "series1", "muted")
CELL_MEANINGS = (
    "was not asked",
    "answered",
    "answered, but the round was skipped",
    "absent",
    "refused",
    "unavailable according to the schedule",
)

KINDS = {
    "visit": "for the answers of a round",
    "unmask": "for the shares that unmask a secure sum",
    "evaluate": "for the evaluation",
    "deliver": "for receipts of the model",
}
"""What the server waits for, by the kind of its messages."""


@dataclass(frozen=True)
class SiteRecord:
    """A site over all rounds so far: one of the codes above per round, and the reason where it gave no answer."""

    name: str
    group: str
    codes: np.ndarray
    reasons: Mapping[int, str]
    seconds: list[float]

    def count(self, *codes: int) -> int:
        """The number of rounds with one of these codes."""
        return int(np.isin(self.codes, codes).sum())

    @property
    def missed_in_a_row(self) -> int:
        """Rounds since its last answer in which it was due."""
        due = self.codes[self.codes != NOT_ASKED]
        answered = np.flatnonzero(np.isin(due, (ANSWERED, UNUSED)))
        return len(due) - (int(answered[-1]) + 1 if len(answered) else 0)

    @property
    def last_answer(self) -> int | None:
        """The last round, from 0, in which it answered."""
        answered = np.flatnonzero(np.isin(self.codes, (ANSWERED, UNUSED)))
        return int(answered[-1]) if len(answered) else None


def _since(seconds: float) -> str:
    return format_seconds(max(0.0, time.time() - seconds))


class Operation:
    """What the folder of a federated run says about its rounds and sites."""

    def __init__(self, run: ReportRun) -> None:
        self.run, path = run, run.folder.path
        self.lines = run.folder.read_lines(ATTENDANCE_FILE)
        self.times = {line["round"]: line for line in run.folder.read_lines(ROUND_TIMES_FILE)}
        self.status = {} if run.done else read_status(path)
        self.census: dict[str, Any] = json.loads((path / CENSUS_FILE).read_text())
        delivery = path / DELIVERY_FILE
        self.delivery: dict[str, str] = json.loads(delivery.read_text())["sites"] if delivery.is_file() else {}

    @property
    def is_waiting(self) -> bool:
        """Whether the server was waiting for sites when it last wrote."""
        return self.run.status == "unfinished" and bool(self.status) and not self.status["is_over"]

    @property
    def skipped(self) -> list[dict[str, Any]]:
        """The lines of the rounds that were skipped."""
        return [line for line in self.lines if "skipped" in line]

    @cached_property
    def sites(self) -> list[SiteRecord]:
        """All sites, in the order of the site table."""
        assert self.run.roster is not None
        assert self.run.roster.listed is not None
        names, groups = self.run.roster.listed["name"], self.run.roster.listed["group"]
        group_names = [group["name"] for group in self.run.roster.groups]
        codes = {name: np.zeros(len(self.lines), np.int64) for name in names}
        reasons: dict[str, dict[int, str]] = {name: {} for name in names}
        for position, line in enumerate(self.lines):
            for name in line["answered"]:
                codes[name][position] = UNUSED if "skipped" in line else ANSWERED
            for name, reason in line["absent"].items():
                codes[name][position] = UNEXPECTED if reason == UNAVAILABLE else ABSENT
                reasons[name][line["round"]] = reason
            for name, reason in line["refused"].items():
                codes[name][position] = REFUSED
                reasons[name][line["round"]] = reason
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for line in self.times.values():
            for name, answer_seconds in line["answered_after"].items():
                seconds[name].append(answer_seconds)
        return [
            SiteRecord(name, group_names[group], codes[name], reasons[name], seconds[name])
            for name, group in zip(names, groups, strict=True)
        ]

    def describe_waiting(self) -> list[tuple[str, float | None]]:
        """What the server waits for, in pieces; a piece with a time is the duration since then."""
        if not self.status or self.run.status != "unfinished":
            return []
        status = self.status
        what = KINDS.get(status["kind"], "for an answer")
        number = "" if status["round"] is None else f"Round {status['round'] + 1}: "
        since: list[tuple[str, float | None]]
        if self.is_waiting:
            names = ", ".join(status["waiting"]) or "nobody"
            deadline = f" of at most {format_seconds(status['deadline'])}, for {names}."
            since = [
                (f"{number}the server has been waiting {what} for ", None),
                (_since(status["began"]), status["began"]),
            ]
            since.append((deadline, None))
        else:
            since = [(f"{number}the server has finished waiting {what} and is at work.", None)]
        return [*since, (" It wrote this ", None), (_since(status["written"]), status["written"]), (" ago.", None)]

    def list_facts(self) -> list[tuple[str, str, str]]:
        """The numbers at the top: name, value, and a line below it."""
        done, total = len(self.lines), int(self.census["rounds"])
        facts = [("rounds done", f"{done:,} of {total:,}", self._describe_rest(total - done))]
        if self.status and self.run.status == "unfinished":
            asked = [*self.status["answered"], *self.status["waiting"], *self.status["refused"], *self.status["absent"]]
            online = set(self.status["online"])
            facts.append(("online", f"{len(online)} of {len(self.sites)}", self._list_offline(online)))
            waiting = ", ".join(self.status["waiting"]) or "nobody"
            facts.append(("have answered", f"{len(self.status['answered'])} of {len(asked)}", f"missing: {waiting}"))
        durations = [line["seconds"] for line in self.times.values()]
        if durations:
            recent = durations[-10:]
            below = f"median of the last {len(recent)}; the longest took {format_seconds(max(durations))}"
            facts.append(("time of a round", format_seconds(statistics.median(recent)), below))
        last = self.skipped[-1]["round"] + 1 if self.skipped else None
        patience = f"the run stops after {self.run.policy['patience']} in a row"
        facts.append(
            ("rounds skipped", str(len(self.skipped)), f"last: round {last}; {patience}" if last else patience)
        )
        if self.delivery:
            delivered = sum(status == "delivered" for status in self.delivery.values())
            facts.append(("model delivered", f"{delivered} of {len(self.delivery)}", "sites have checked its hash"))
        return facts

    def list_alarms(self) -> list[str]:
        """What somebody should look at."""
        alarms = [] if self.run.status in ("done", "unfinished") else [f"The run has stopped: {self.run.status}."]
        alarms += [f"Data: {warning}." for warning in self.census.get("preparation", {}).get("warnings", [])]
        unregistered = self.census.get("missing", {})
        alarms += [f"Site {name!r} takes no part in the run: {reason}." for name, reason in unregistered.items()]
        for site in self.sites:
            reasons = list(site.reasons.values())
            if site.missed_in_a_row >= MISSED_ROUNDS:
                rounds = f"in its last {site.missed_in_a_row} rounds"
                alarms.append(f"Site {site.name!r} has given no answer {rounds}: {reasons[-1]}.")
        alarms += [
            f"Site {name!r} has not received the model: {status}. It is sent again when the run is resumed."
            for name, status in self.delivery.items()
            if status != "delivered"
        ]
        return alarms

    def tabulate_sites(self) -> ReportTable:
        """A row per site: what it does now, and how often it answered."""
        rows = []
        for site in self.sites:
            median = statistics.median(site.seconds) if site.seconds else None
            last = site.last_answer
            cells = [Cell(site.name), Cell(self._describe_now(site.name)), Cell(site.group)]
            for codes in ((ANSWERED, UNUSED), (ABSENT, UNEXPECTED), (REFUSED,)):
                cells.append(Cell(str(site.count(*codes)), site.count(*codes)))
            cells.append(Cell("never" if last is None else f"round {last + 1}", -1 if last is None else last))
            cells.append(Cell("–" if median is None else format_seconds(median), median))
            if self.delivery:
                cells.append(Cell("yes" if self.delivery.get(site.name) == "delivered" else "no"))
            rows.append(cells)
        headers = ["site", "now", "group", "answered", "absent", "refused", "last answer", "median time"]
        headers += ["has the model"] if self.delivery else []
        return ReportTable(
            "operation-sites", "Sites: what they do now, and in how many rounds they answered.", headers, rows
        )

    def list_reasons(self) -> list[tuple[str, str]]:
        """For every site that has missed a round: its reasons, the most frequent first, with the rounds."""
        lines = []
        for site in self.sites:
            counts = Counter(site.reasons.values())
            texts = []
            for reason, count in counts.most_common():
                last = max(number for number, text in site.reasons.items() if text == reason) + 1
                rounds = f"round {last}" if count == 1 else f"{count} rounds, last in round {last}"
                texts.append(f"{reason} ({rounds})")
            if texts:
                lines.append((site.name, "; ".join(texts)))
        return lines

    def tabulate_rounds(self) -> ReportTable:
        """The last rounds, the newest first."""
        records = self.run.folder.read_records()
        columns = {"auc": "AUC", "validation_auc": "validation AUC"}
        shown = {name: title for name, title in columns.items() if name == "auc" or any(name in r for r in records)}
        evaluated = {record["round"]: record for record in records}
        rows = []
        for line in reversed(self.lines[-MAX_ROUNDS:]):
            number, times = line["round"], self.times.get(line["round"], {})
            seconds, values = times.get("seconds"), [evaluated.get(number, {}).get(name) for name in shown]
            missing = [f"{name}: {reason}" for name, reason in {**line["absent"], **line["refused"]}.items()]
            skipped = [line["skipped"].removeprefix(f"round {number}: ")] if "skipped" in line else []
            note = "; ".join([*skipped, *missing]) or "–"
            rows.append(
                [
                    Cell(str(number + 1), number),
                    Cell("–" if seconds is None else format_seconds(seconds), seconds),
                    Cell(f"{len(line['answered'])} of {len(line['answered']) + len(missing)}", len(line["answered"])),
                    *(Cell("–" if value is None else f"{value:.4f}", value) for value in values),
                    Cell(str(times.get("ended", "–")).replace("T", " ").replace("+00:00", "")),
                    Cell(note),
                ]
            )
        headers = ["round", "time", "answered", *shown.values(), "ended (UTC)", "missing or skipped"]
        return ReportTable("operation-rounds", "Rounds, the newest first.", headers, rows)

    def draw_attendance(self) -> Figure:
        """Sites against rounds: who answered, who was absent, whose answer was refused."""
        sites = self.sites
        if len(sites) > MAX_SITES:
            sites = sorted(sites, key=lambda site: -site.count(ABSENT, REFUSED, UNEXPECTED))[:MAX_SITES]
        codes = np.array([site.codes[-MAX_ROUNDS:] for site in sites])
        first = max(0, len(self.lines) - MAX_ROUNDS) + 1
        present = sorted({int(code) for code in np.unique(codes)} - {NOT_ASKED})
        refused, absent = int((codes == REFUSED).sum()), int(np.isin(codes, (ABSENT, UNEXPECTED)).sum())
        shown = "" if len(sites) == len(self.sites) else f" of the {len(sites)} sites that missed most"
        return Figure(
            key="attendance",
            title="Who answered in which round",
            summary=f"Answers{shown} in rounds {first} to {len(self.lines)}: {absent} absences, {refused} refusals.",
            x=Axis("round"),
            y=Axis(""),
            layers=[Cells([site.name for site in sites], first, codes, CELL_COLOURS, CELL_MEANINGS)],
            height=max(200, 120 + 20 * len(sites)),
            wide=True,
            legend=[(CELL_MEANINGS[code], CELL_COLOURS[code]) for code in present],
        )

    def draw_times(self) -> Figure:
        """The seconds of every round."""
        numbers = sorted(self.times)[-MAX_ROUNDS:]
        seconds = np.array([self.times[number]["seconds"] for number in numbers], dtype=float)
        x = np.array(numbers) + 1.0
        layers: list[Layer] = [Line("seconds", x, seconds, markers=len(numbers) <= 60)]
        skipped = np.isin(numbers, [line["round"] for line in self.skipped])
        if skipped.any():
            y = seconds[skipped]
            layers.append(Points("skipped", x[skipped], y, y, y, "series1", "x"))
        return Figure(
            key="round-times",
            title="Time of a round",
            summary=f"Seconds from a round's first message to its end, {len(numbers)} rounds, {skipped.sum()} skipped.",
            x=Axis("round"),
            y=Axis("seconds"),
            layers=layers,
            height=260,
            wide=True,
        )

    def _describe_rest(self, rounds: int) -> str:
        durations = [line["seconds"] for line in self.times.values()][-10:]
        if self.run.status != "unfinished":
            return "the run is done" if self.run.done else "the run has stopped"
        return f"about {format_seconds(statistics.median(durations) * rounds)} left" if durations else "none yet"

    def _list_offline(self, online: set[str]) -> str:
        offline = [site.name for site in self.sites if site.name not in online]
        more = f" and {len(offline) - 3} more" if len(offline) > 3 else ""
        return f"offline: {', '.join(offline[:3])}{more}" if offline else "all sites"

    def _describe_now(self, name: str) -> str:
        """What a site does now, as the server has last seen it."""
        if not self.status or self.run.status != "unfinished":
            return "–"
        is_online = "online" if name in self.status["online"] else "offline"
        if name in self.status["answered"]:
            return f"answered after {format_seconds(self.status['answered'][name])}"
        for word in ("refused", "absent"):
            if name in self.status[word]:
                return f"{word}, {is_online}"
        return f"awaited, {is_online}" if name in self.status["waiting"] else f"not due, {is_online}"
