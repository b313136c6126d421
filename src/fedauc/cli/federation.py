"""The commands `fedauc federation`: write a Flower app, try it on this machine, resume it, and summarize a run."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedauc.cli import federation_nvflare, federation_operations, federation_site
from fedauc.cli.wrapped_lines import print_wrapped
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.guarantee import describe_spending
from fedauc.federation.agreement import check_groups
from fedauc.federation.app_folder import create_app_folder
from fedauc.federation.app_settings import merge_settings, read_app_config, read_settings, read_template_config
from fedauc.federation.deploy_folder import DEPLOY_FOLDER, Deployment, check_deployment, write_deploy_folder
from fedauc.federation.evaluation import WITHHELD
from fedauc.federation.local_federation import LocalFederation, find_program, run_flwr, write_demo_sites
from fedauc.federation.membership import list_member_names
from fedauc.federation.pausing import PAUSED, request_pause
from fedauc.federation.quarantine import request_release
from fedauc.federation.registration import CENSUS_FILE
from fedauc.federation.run_config import check_run_config
from fedauc.federation.run_outcome import RunOutcome, find_run_id, read_outcome
from fedauc.federation.schema import SCHEMA_FILE, make_schema, summarize_schema
from fedauc.federation.server import AGREEMENT_FILE, ATTENDANCE_FILE, read_failure, summarize_run
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
    example: Annotated[
        Path | None, typer.Option("--example", help="A table with the columns of the sites', to describe in a schema.")
    ] = None,
    label: Annotated[str, typer.Option("--label", metavar="COLUMN", help="The example's label column.")] = "y",
    ignore: Annotated[
        str, typer.Option("--ignore", metavar="a,b", help="Columns of the example that are not used.")
    ] = "",
) -> None:
    """Write a Flower app with certificates, keys, the site table, the schema of the sites' tables, and deploy/.

    deploy/ holds files that start the server and the sites.

    The example may be made up. Its names, kinds and categories are copied; ranges are widened and quote no row.

    Example: [bold]fedauc federation init hospitals --sites north=day,south=night --example rows.csv[/bold]
    """
    groups: dict[str, str] = {}
    for pair in _read_list("sites", sites):
        name, _, group = pair.partition("=")
        if name in groups:
            raise ValueError(f"sites lists {name!r} twice; list each once")
        groups[name] = group
    check_groups(groups)
    ignored = _read_list("ignore", ignore) if ignore else []
    schema = None if example is None else make_schema(example, label, ignored)
    names = _read_list("hosts", hosts)
    deployment = Deployment(folder.absolute(), list(groups), names[0], has_schema=schema is not None)
    check_deployment(deployment)
    create_app_folder(folder, groups, names, schema)
    write_deploy_folder(folder, deployment)
    print(f"wrote {folder}: start with {folder / 'README.md'}")
    print(f"{folder / DEPLOY_FOLDER}: files that start the server and the sites, with containers or systemd")
    if schema is None:
        print("no schema: sites' columns will not be checked or reordered; give a table with --example")
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in summarize_schema(schema).items())
    print(f"{folder / SCHEMA_FILE}: {kinds}, label {schema.label!r} ({schema.positive!r} is positive)")
    print("add units and correct its ranges with the sites, then send it to them")


@app.command()
def local(
    out: Annotated[Path, typer.Option("--out", help="The folder to make.", show_default=False)],
    sites: Annotated[int, typer.Option("--sites", min=2, help="How many sites share the demo data.")] = 4,
    groups: Annotated[
        int | None,
        typer.Option("--groups", min=1, help="How many groups take turns; by default 3, or 2 for two sites."),
    ] = None,
    run_config: Settings = "",
) -> None:
    """Start a SuperLink, SuperNodes and a run on this machine, with TLS and keys, and stop them when the run ends.

    Example: [bold]fedauc federation local --sites 4 --run-config "cycles=2" --out trial[/bold]
    """
    groups = min(3, sites) if groups is None else groups
    if groups > sites:
        raise ValueError(f"--groups is {groups}; it must be at most the {sites} sites: lower --groups or raise --sites")
    check_run_config(merge_settings(read_template_config(out), read_settings(run_config)))
    names = {f"site-{number:03d}": f"group-{number % groups}" for number in range(sites)}
    create_app_folder(out, names)
    write_demo_sites(out / "sites", list(names))
    _run_trial(out, list(names), run_config)


@app.command()
def run(
    folder: Folder,
    superlink: Annotated[str, typer.Argument(help="The SuperLink's name in Flower's config.toml.", show_default=False)],
    run_config: Settings = "",
) -> None:
    """Start a run of the app and follow it: as `flwr run --stream`, but exit code 3 when the run fails.

    Example: [bold]fedauc federation run . hospitals --run-config "cycles=20 quorum=1"[/bold]
    """
    config = merge_settings(read_app_config(folder), read_settings(run_config))
    check_run_config(config)
    options = ("--run-config", run_config) if run_config else ()
    command = [str(find_program("flwr")), "run", str(folder), superlink, "--stream", *options]
    lines = list[str]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            print(line, end="", flush=True)
    run_id = find_run_id("".join(lines))
    if not run_id:
        raise TrainingStopped(f"`flwr run` started no run; it ended with exit code {process.returncode}")
    outcome = read_outcome(run_flwr, superlink, run_id)
    if not outcome.completed:
        raise TrainingStopped(_describe_outcome(outcome))
    print(f"run {run_id} is complete; `fedauc federation show {config['out']}` prints its AUC and attendance")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def superlink(context: typer.Context) -> None:
    """Start Flower's SuperLink, set up for large models. Its options are those that `flower-superlink --help` shows.

    Example: [bold]fedauc federation superlink --port 9092 --database superlink.db --enable-supernode-auth[/bold]
    """
    find_program("flower-superlink")
    # As for a site: this process has imported torch, which the SuperLink does not need.
    os.execv(sys.executable, [sys.executable, "-m", "fedauc.federation.superlink", *context.args])


@app.command()
def site(
    superlink: Annotated[str, typer.Option("--superlink", metavar="HOST:PORT", help="The server's SuperLink.")],
    root_certificates: Annotated[
        Path, typer.Option("--root-certificates", help="The certificate of the authority that signed the server's.")
    ],
    key: Annotated[Path, typer.Option("--key", help="The site's private key, as ssh-keygen writes it.")],
    node_config: Annotated[
        str, typer.Option("--node-config", metavar="'k=v ...'", help="data, state and policy of the site.")
    ],
) -> None:
    """Serve a site: connect to the SuperLink, and keep a worker with the rows and the model loaded.

    Example: [bold]fedauc federation site --superlink fed.example.org:9092 --root-certificates ca.pem --key north
    --node-config 'data="/data/rows.csv" state="/data/fedauc"'[/bold]
    """
    for option, path in (("root-certificates", root_certificates), ("key", key)):
        if not path.is_file():
            raise ValueError(
                f"{option} is {str(path)!r}, but there is no such file: give the path of a file that exists"
            )
    paths = ("--root-certificates", str(root_certificates), "--key", str(key))
    words = ("--superlink", superlink, *paths, "--node-config", node_config)
    # This process has imported torch; the one that waits for messages needs none of it, and takes over its number.
    os.execv(sys.executable, [sys.executable, "-m", "fedauc.federation.site_node", *words])


@app.command()
def resume(folder: Folder, run_config: Settings = "") -> None:
    """Go on with a local trial from its last finished round.

    Example: [bold]fedauc federation resume trial[/bold]
    """
    if not (folder / "run" / AGREEMENT_FILE).is_file():
        raise ValueError(
            f"{folder} holds no run to go on with; start one with `fedauc federation local --out {folder}`"
        )
    if not (folder / "sites").is_dir():
        raise ValueError(f'{folder} is no local trial; start its SuperLink and sites, and give `run` "resume=true"')
    check_run_config(merge_settings(read_app_config(folder), read_settings(run_config)))
    names = sorted(path.name for path in (folder / "sites").iterdir())
    _run_trial(folder, names, f"resume=true {run_config}".strip())


@app.command()
def pause(
    folder: Folder,
    at_cycle_end: Annotated[
        bool, typer.Option("--at-cycle-end", help="Go on to the end of the cycle, where sites may join and leave.")
    ] = False,
) -> None:
    """Ask the server to stop after the round under way; call it on the server's machine. Resuming goes on.

    The folder is the app's or the run's. The run then ends with exit code 3 and the status "paused by the operator".

    Example: [bold]fedauc federation pause hospitals[/bold]
    """
    request_pause(_find_run(folder), at_cycle_end)
    moment = "the cycle" if at_cycle_end else "the round under way"
    print(f"the server will stop after {moment}; `fedauc federation show` says when it has")


@app.command()
def show(folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print how a federated run went: AUC, rounds, traffic, and how often each site answered.

    Example: [bold]fedauc federation show trial[/bold]
    """
    folder = folder.absolute()
    if failure := read_failure(folder / "run") or read_failure(folder):
        raise TrainingStopped(f"the run could not begin: {failure}")
    summary = summarize_run(_find_run(folder))
    if as_json:
        print(json.dumps(summary, indent=2))
        return
    for line in describe_summary(summary):
        print_wrapped(line)
    missing = [f"{name} {status}" for name, status in summary["delivery"].items() if status != "delivered"]
    if summary["delivery"]:
        print(f"model delivered to {len(summary['delivery']) - len(missing)} of {len(summary['delivery'])} sites")
    for line in missing:
        print_wrapped(f"not delivered: {line}")
    if summary["status"] not in ("done", "unfinished") and not summary["status"].startswith(PAUSED):
        raise TrainingStopped(f"the run has stopped: {summary['status']}")


@app.command()
def release(
    folder: Folder, site: Annotated[str, typer.Argument(help="The site's name, as in the site table.")]
) -> None:
    """Let the server ask a site again that is in quarantine, beginning with its next round.

    Example: [bold]fedauc federation release run north[/bold]
    """
    run = _find_run(folder)
    if not (run / AGREEMENT_FILE).is_file():
        raise ValueError(f"{folder} holds no federated run: it has no {AGREEMENT_FILE}; give the app's or run's folder")
    agreed = [entry["name"] for entry in json.loads((run / AGREEMENT_FILE).read_text())["sites"]]
    request_release(run, site, list_member_names(run, agreed))
    print(f"site {site!r} is asked again from the server's next round on")


def describe_summary(summary: dict[str, Any]) -> list[str]:
    """A run's summary as lines: how far it is, what it waits for, and how often every site answered."""
    rounds, cycles, length = summary["rounds"], summary["cycles"], summary["cycle_length"] or 0
    turns = (
        f": {cycles} cycles of {length}" if length > 1 and rounds in (cycles * length, (cycles + 1) * length) else ""
    )
    turns += ", after one that collects scores" if turns and rounds > cycles * length else ""
    lines = [f"{summary['status']}, {summary['done']} of {rounds} rounds{turns}"]
    lines += [describe_record(record) for record in summary["records"][-1:]]
    if "stopped_early" in summary["result"]:
        lines.append(f"stopped early: {summary['result']['stopped_early']}")
    if "kept_round" in summary["result"]:
        best = summary["result"]["final"]
        lines.append(f"the model is that of the best evaluation: {describe_record(best)}")
    if summary["privacy"] is not None:
        lines.append(describe_spending(summary["privacy"], summary["records"]))
    if recent := summary["round_seconds"][-10:]:
        lines.append(f"a round takes {statistics.median(recent):.1f} s (median of the last {len(recent)})")
    now = summary["now"]
    if summary["status"] == "unfinished" and now and not now["is_over"]:
        round = "" if now["round"] is None else f"round {now['round'] + 1}: "
        seconds = f"{time.time() - now['began']:.0f} s of at most {now['deadline']:.0f} s"
        lines.append(f"{round}waiting since {seconds} for {', '.join(now['waiting'])}")
    lines += [f"warning: {warning}" for warning in summary["warnings"]]
    for name, counts in summary["attendance"].items():
        if name in summary["missing"] and not any(counts.values()):
            lines.append(f"{name}: takes no part in the run: {summary['missing'][name]}")
            continue
        reason = f"; last: {summary['reasons'][name]}" if name in summary["reasons"] else ""
        answered = ", ".join(f"{status} {count}" for status, count in counts.items())
        lines.append(f"{name}: {answered}{reason}")
        if missing := summary["missing_evaluations"].get(name):
            evaluations = f"{missing['count']} of {len(summary['records'])} evaluations"
            lines.append(f"{name}: no scores in {evaluations}; last: {missing['reason']}")
    for part, names in (summary["records"][-1] if summary["records"] else {}).get("withheld", {}).items():
        lines += [f"{name}: no scores of its {part} rows: {WITHHELD}" for name in names]
    lines += [f"{name} {text}" for name, text in summary["quarantine"].items()]
    return lines


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
            missing += [
                f"{name} {answer['staleness']} rounds late, weight {answer['weight']:.3g}"
                for name, answer in line.get("late", {}).items()
            ]
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
    parts = [_describe_auc(record, "auc", "test", "AUC")]
    if "validation_auc" in record:
        parts.append(_describe_auc(record, "validation_auc", "validation", "validation AUC"))
    return f"round {record['round'] + 1}: {'; '.join(parts)}"


def _describe_auc(record: dict[str, Any], column: str, part: str, label: str) -> str:
    """The AUC of a record over a part of the sites' held-out rows."""
    if record[column] is None:
        return f"no {label}"
    bounds = f"between {record[f'{column}_low']:.4f} and {record[f'{column}_high']:.4f}"
    rows = f"{record[f'{part}_positives']} positives and {record[f'{part}_negatives']} negatives"
    return f"{label} {record[column]:.4f}, {bounds}, over {rows} at {record[f'{part}_sites']} sites"


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
        outcome = trial.read_run_outcome()
    if not outcome.completed:
        raise TrainingStopped(f"{_describe_outcome(outcome)}; see {folder / 'logs' / 'run.log'}")
    show(folder)


def _describe_outcome(outcome: RunOutcome) -> str:
    """Why a run has not come to its end: it has failed, or the operator has paused it."""
    return f"the run {'is ' if outcome.reason.startswith(PAUSED) else 'failed: '}{outcome.reason}"


def _find_run(folder: Path) -> Path:
    """The run's folder, given that or the app's."""
    folder = folder.absolute()
    return folder / "run" if (folder / "run").is_dir() else folder


def _read_list(option: str, text: str) -> list[str]:
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise ValueError(f"{option} is {text!r}; it must list at least 1")
    return items


app.registered_commands += federation_site.app.registered_commands + federation_operations.app.registered_commands
app.add_typer(federation_nvflare.app, name="nvflare")
