"""The commands `fedauc federation`: write a Flower app, try it on this machine, resume it, and summarize a run."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedauc.experiments.folder import RunFolder
from fedauc.experiments.guarantee import describe_spending
from fedauc.federation.app_folder import create_app_folder
from fedauc.federation.local_federation import LocalFederation, write_demo_sites
from fedauc.federation.server import AGREEMENT_FILE, ATTENDANCE_FILE, CENSUS_FILE, summarize_run
from fedauc.guards import TrainingStopped

app = typer.Typer(no_args_is_help=True, help="The same algorithms across machines, on Flower.")

Folder = Annotated[Path, typer.Argument(help="The app's folder.", show_default=False)]
Settings = Annotated[
    str, typer.Option("--run-config", metavar="'k=v ...'", help="Settings of the app's pyproject.toml.")
]


@app.command()
def init(
    folder: Folder,
    sites: Annotated[str, typer.Option("--sites", metavar="name=group,...", help="The sites and their groups.")],
    hosts: Annotated[str, typer.Option("--hosts", help="The server's names or addresses.")] = "localhost,127.0.0.1",
) -> None:
    """Write a Flower app with certificates, keys and the server's site table.

    Example: [bold]fedauc federation init hospitals --sites north=day,south=night --hosts fed.example.org[/bold]
    """
    groups: dict[str, str] = {}
    for pair in _read_list("sites", sites):
        name, _, group = pair.partition("=")
        if name in groups:
            raise ValueError(f"sites lists {name!r} twice; list each once")
        groups[name] = group
    create_app_folder(folder, groups, _read_list("hosts", hosts))
    print(f"wrote {folder}: start with {folder / 'README.md'}")


@app.command()
def local(
    out: Annotated[Path, typer.Option("--out", help="The folder to make.", show_default=False)],
    sites: Annotated[int, typer.Option("--sites", min=2, help="How many sites share the demo data.")] = 4,
    groups: Annotated[int, typer.Option("--groups", min=1, help="How many groups take turns.")] = 3,
    run_config: Settings = "",
) -> None:
    """Start a SuperLink, SuperNodes and a run on this machine, with TLS and keys, and stop them when the run ends.

    Example: [bold]fedauc federation local --sites 4 --run-config "cycles=2" --out trial[/bold]
    """
    if groups > sites:
        raise ValueError(f"groups is {groups}; it must be at most the {sites} sites")
    names = {f"site-{number:03d}": f"group-{number % groups}" for number in range(sites)}
    create_app_folder(out, names)
    write_demo_sites(out / "sites", list(names))
    _run_trial(out, list(names), run_config)


@app.command()
def resume(folder: Folder, run_config: Settings = "") -> None:
    """Go on with a local trial from its last finished round.

    Example: [bold]fedauc federation resume trial[/bold]
    """
    if not (folder / "run" / AGREEMENT_FILE).is_file():
        raise ValueError(
            f"{folder} holds no run to go on with; start one with `fedauc federation local --out {folder}`"
        )
    names = sorted(path.name for path in (folder / "sites").iterdir())
    _run_trial(folder, names, f"resume=true {run_config}".strip())


@app.command()
def show(folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print how a federated run went: AUC, rounds, traffic, and how often each site answered.

    Example: [bold]fedauc federation show trial[/bold]
    """
    summary = summarize_run(folder / "run" if (folder / "run").is_dir() else folder)
    if as_json:
        print(json.dumps(summary, indent=2))
        return
    print(f"{summary['status']}, {summary['done']} of {summary['rounds']} rounds")
    for record in summary["records"][-1:]:
        print(describe_record(record))
    if summary["privacy"] is not None:
        print(describe_spending(summary["privacy"], summary["records"]))
    for name, counts in summary["attendance"].items():
        print(f"{name}: answered {counts['answered']}, absent {counts['absent']}, refused {counts['refused']}")


def print_progress(path: Path, is_running: Callable[[], bool]) -> None:
    """Print a line per new round and per new evaluation until the run ends."""
    folder = RunFolder(path)
    printed_rounds, printed_records = len(folder.read_lines(ATTENDANCE_FILE)), len(folder.read_records())
    goes_on = True
    while goes_on:
        # Asked before reading, so that the last lines of a run that ends meanwhile are printed too.
        goes_on = is_running()
        attendance, records = folder.read_lines(ATTENDANCE_FILE), folder.read_records()
        for line in attendance[printed_rounds:]:
            total = json.loads((path / CENSUS_FILE).read_text())["rounds"]
            missing = [f"{name} missing: {reason}" for name, reason in {**line["absent"], **line["refused"]}.items()]
            missing += [f"skipped: {line['skipped']}"] if "skipped" in line else []
            answered = ", ".join(line["answered"]) or "no site"
            print("; ".join([f"round {line['round'] + 1} of {total}: {answered}", *missing]), flush=True)
        for record in records[printed_records:]:
            print(describe_record(record), flush=True)
        printed_rounds, printed_records = len(attendance), len(records)
        if goes_on:
            time.sleep(0.5)


def describe_record(record: dict[str, Any]) -> str:
    """A record as one line of text."""
    if record["auc"] is None:
        return f"round {record['round'] + 1}: no AUC"
    bounds = f"between {record['auc_low']:.4f} and {record['auc_high']:.4f}"
    rows = f"{record['test_positives']} positives and {record['test_negatives']} negatives"
    auc = f"round {record['round'] + 1}: AUC {record['auc']:.4f}"
    return f"{auc}, {bounds}, over {rows} at {record['test_sites']} sites"


def _run_trial(folder: Path, names: list[str], settings: str) -> None:
    """Start all processes and the run, print its progress, and stop all processes when it ends."""
    # SIGTERM must stop the started processes, as an interrupt from the keyboard does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with LocalFederation(folder) as trial:
        trial.start_superlink()
        print(f"SuperLink on 127.0.0.1:{trial.port}, logs in {trial.folder / 'logs'}")
        for name in names:
            trial.register_site(name)
            trial.start_site(name)
        trial.start_run(settings)
        print_progress(trial.folder / "run", lambda: trial.is_running("run"))
    started = (folder / "run" / CENSUS_FILE).is_file()
    status = summarize_run(folder / "run")["status"] if started else "not started"
    if status != "done":
        raise TrainingStopped(f"the run is {status}; see {folder / 'logs' / 'run.log'}, then resume")
    show(folder)


def _read_list(option: str, text: str) -> list[str]:
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise ValueError(f"{option} is {text!r}; it must list at least 1")
    return items
