"""The table of a tuning: its trials, the best first, and how to train the best one again."""

from __future__ import annotations

import shlex

from rich.console import Console

from fedauc.experiments.tuning import TrialSummary, Tuning, name_trial
from fedauc.files import write_atomically
from fedauc.metrics import parse_metrics
from fedauc.reports.tables import TextTable, format_share

SHOWN_TRIALS = 10
"""Trials that a terminal shows; `table.md` has all."""


def tabulate_trials(label: str, trials: list[TrialSummary]) -> TextTable:
    """A row per trial, the best first; `-` stands for a trial that was stopped, since its model is not finished.

    >>> trials = [TrialSummary(3, {"learning-rate": "0.1"}, "done", 0.91), TrialSummary(0, {}, "stopped", None)]
    >>> print(tabulate_trials("AUC", trials).to_markdown(), end="")
    | trial | validation AUC | state | setting |
    | --- | --- | --- | --- |
    | 3 | .9100 | done | learning-rate=0.1 |
    | 0 | - | stopped |  |
    """
    rows = []
    for trial in trials:
        value = "-" if trial.state != "done" or trial.value is None else format_share(trial.value, 4)
        setting = " ".join(f"{option}={text}" for option, text in trial.options.items())
        rows.append([str(trial.number), value, trial.state, setting])
    return TextTable(["trial", f"validation {label}", "state", "setting"], rows, "", [])


def describe_best(tuning: Tuning, trials: list[TrialSummary]) -> list[str]:
    """The best trial with its test metric, which no other trial shows, and the command that trains it again."""
    if not trials or trials[0].state != "done" or trials[0].value is None:
        return ["No trial has finished yet."]
    best, folder = trials[0], tuning.path / name_trial(trials[0].number)
    final, metric = tuning.open_run(best.number).read_result()["final"], parse_metrics(tuning.space.base.metrics)[0]
    value, *ends = (final[column] for column in metric.columns)
    interval = f" [{ends[0]:.4f}, {ends[1]:.4f}]" if ends and ends[0] is not None else ""
    command = ["fedauc", "run", "--config", str(folder / "config.json"), "--out", f"{tuning.path}-best"]
    return [
        f"Best: trial {best.number}, validation {metric.label} {best.value:.4f}, test {metric.label} "
        f"{value:.4f}{interval}, in {folder}",
        f"Train it again: {shlex.join(command)}",
    ]


def print_trials(tuning: Tuning) -> None:
    """Print the best trials at the width of the terminal, and what to do with the best one."""
    trials, console = tuning.list_trials(), Console()
    console.print(tabulate_trials(tuning.label, trials[:SHOWN_TRIALS]).to_rich())
    if len(trials) > SHOWN_TRIALS:
        console.print(f"{len(trials) - SHOWN_TRIALS} more trials are in {tuning.path / 'table.md'}", soft_wrap=True)
    for line in describe_best(tuning, trials):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def write_trials(tuning: Tuning) -> None:
    """Write all trials to `table.md`, and print the best ones."""
    trials = tuning.list_trials()
    lines = [tabulate_trials(tuning.label, trials).to_markdown(), *describe_best(tuning, trials)]
    write_atomically(tuning.path / "table.md", ("\n".join(lines) + "\n").encode())
    print_trials(tuning)
