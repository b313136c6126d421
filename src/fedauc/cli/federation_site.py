"""The commands of `fedauc federation` for a site's operator: check, policy, plan, approve, audit and report."""

from __future__ import annotations

import getpass
import json
import math
import string
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from fedauc.cli.wrapped_lines import print_wrapped
from fedauc.federation.agreement import read_sites
from fedauc.federation.app_settings import merge_settings, read_app_config, read_settings
from fedauc.federation.audit_log import LOG_FILE, read_entries, verify_log
from fedauc.federation.delivery import MODEL_FOLDER, verify_model
from fedauc.federation.owner_policy import EXAMPLE_POLICY
from fedauc.federation.run_config import read_run_config
from fedauc.federation.run_plan import describe_plan, hash_plan
from fedauc.federation.site_check import SiteSetup, check_site
from fedauc.federation.site_control import SiteHome
from fedauc.federation.site_report import describe_report, list_reports
from fedauc.files import write_atomically

app = typer.Typer()

State = Annotated[Path, typer.Argument(metavar="STATE", help="The site's state folder.", show_default=False)]

WIDTH = 80

HASH_LENGTH = 64
"""Digits of a SHA-256."""


@app.command()
def check(
    data: Annotated[Path, typer.Option("--data", help="The site's table.", show_default=False)],
    state: Annotated[Path, typer.Option("--state", help="The site's state folder.", show_default=False)],
    schema: Annotated[Path | None, typer.Option("--schema", help="The federation's schema.toml.")] = None,
    policy: Annotated[Path | None, typer.Option("--policy", help="The site's policy file.")] = None,
    certificate: Annotated[Path | None, typer.Option("--certificate", help="The authority's ca.pem.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="The site's private key.")] = None,
    server: Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="The server, to try its clock.")] = "",
) -> None:
    """Dry run at a site: table, policy, versions, disk, certificate, key, clock, and a test round. Nothing is sent.

    Example: [bold]fedauc federation check --data rows.csv --state /data/fedauc --schema schema.toml[/bold]
    """
    results = check_site(SiteSetup(data, state, schema, policy, certificate, key, server))
    if schema is None:
        print("no --schema: the table is not checked, and no round is tried")
    for part, is_ok, text in results:
        beginning = f"{'ok  ' if is_ok else 'FAIL'}  {part:<12}"
        print(textwrap.fill(text, WIDTH, initial_indent=beginning, subsequent_indent=" " * len(beginning)))
    failed = [part for part, is_ok, _ in results if not is_ok]
    if failed:
        raise ValueError(f"{len(failed)} of {len(results)} checks failed ({', '.join(dict.fromkeys(failed))})")
    print("ready")


@app.command()
def policy(path: Annotated[Path, typer.Argument(help="The file to write.", show_default=False)]) -> None:
    """Write a policy file for a site, with every setting and its meaning.

    Example: [bold]fedauc federation policy policy.toml[/bold]
    """
    if path.exists():
        raise ValueError(f"{path} exists already; choose another name")
    write_atomically(path, EXAMPLE_POLICY.encode(), is_private=True)
    print(f"wrote {path}: edit it, then name it in the site's --node-config")


@app.command()
def plan(
    folder: Annotated[Path, typer.Argument(help="The app's folder.", show_default=False)],
    run_config: Annotated[
        str, typer.Option("--run-config", metavar="'k=v ...'", help="Settings that differ from pyproject.toml.")
    ] = "",
    out: Annotated[Path | None, typer.Option("--out", help="A JSON file for the plan.")] = None,
) -> None:
    """Print the hash of what a run is going to do, which sites list in their policy or approve.

    Example: [bold]fedauc federation plan hospitals --run-config "cycles=20"[/bold]
    """
    config = merge_settings(read_app_config(folder), read_settings(run_config))
    described = describe_plan(read_run_config(config, read_sites(Path(config["sites"]))))
    print(hash_plan(described))
    if out is not None:
        write_atomically(out, f"{json.dumps(described, indent=2)}\n".encode())


@app.command()
def approve(
    state: State,
    plan: Annotated[
        str, typer.Argument(help="The plan's hash, or its beginning; unless given, plans are listed.")
    ] = "",
    refuse: Annotated[bool, typer.Option("--refuse", help="Refuse the plan, also while it runs.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the plan, and decide nothing.")] = False,
) -> None:
    """List the plans that servers have proposed to a site, and approve or refuse one.

    Example: [bold]fedauc federation approve /data/fedauc 3f9a1c[/bold]
    """
    home = _open_home(state)
    if not plan:
        for digest in home.list_plans():
            print(_describe_proposal(home, digest))
        if not home.list_plans():
            print("no server has proposed a plan yet")
        return
    digest = home.find_plan(plan)
    proposed = home.read_plan(digest)
    if show and proposed is not None:
        print(json.dumps(proposed.document, indent=2))
        return
    decision = "refused" if refuse else "approved"
    home.decide(digest, decision, getpass.getuser())
    print(f"{decision} plan {digest}")


@app.command()
def audit(
    state: State,
    head: Annotated[str, typer.Option("--head", help="A hash that was noted earlier; the log must contain it.")] = "",
    lines: Annotated[int, typer.Option("--lines", min=0, help="How many of the last lines to print.")] = 10,
) -> None:
    """Verify a site's audit log: every line, their order, and that none is missing. Print its last lines and its head.

    Note the head somewhere else: who can write all files of the site could also rewrite its whole log.

    Example: [bold]fedauc federation audit /data/fedauc[/bold]
    """
    if head and (len(head) != HASH_LENGTH or not set(head) <= set(string.hexdigits.lower())):
        raise ValueError(f"head is {head!r}; it must be the {HASH_LENGTH} characters that this command has printed")
    report = verify_log(_open_home(state).folder, head)
    if not report.problem and not (state / LOG_FILE).is_file():
        raise ValueError(f"{state} has no audit log ({LOG_FILE}); give the site's state folder, as in --node-config")
    if report.problem:
        raise ValueError(f"{state} has a damaged audit log: {report.problem}")
    entries = read_entries(state)
    for entry in entries[len(entries) - min(lines, len(entries)) :]:
        print_wrapped(describe_entry(entry))
    sent = sum(entry.get("bytes_sent", 0) for entry in entries)
    print(f"{report.head.entries} lines, {sent:,} bytes sent, intact")
    print(f"head {report.head.hash}")


@app.command()
def report(
    state: State, run: Annotated[str, typer.Option("--run", help="The run's id; the last unless given.")] = ""
) -> None:
    """Print a site's own AUC and thresholds, which never leave the site.

    Example: [bold]fedauc federation report /data/fedauc[/bold]
    """
    runs = list_reports(_open_home(state).folder)
    if not runs or (run and run not in runs):
        listed = ", ".join(runs) or "none"
        raise ValueError(f"{state} has no report{f' of run {run!r}' if run else ''}; runs with one: {listed}")
    for line in describe_report(state, run or runs[-1]):
        print(textwrap.fill(line, WIDTH))
    folder = state / MODEL_FOLDER / (run or runs[-1])
    if folder.is_dir():
        changed = verify_model(folder)
        print(f"model: {folder} holds the model that was delivered, by its hash")
        if changed:
            print(f"files beside the model that have changed since: {', '.join(changed)}")


def describe_entry(entry: dict[str, Any]) -> str:
    """A line of the audit log in words."""
    time = str(entry["time"]).replace("+00:00", "Z")
    if entry["event"] != "message":
        return f"{time} {entry['event']} {str(entry.get('plan', ''))[:12]}".rstrip()
    round = "" if entry["round"] is None else f" of round {entry['round'] + 1}"
    sent = "" if entry["sent"] == entry["asked"] else f"{entry['sent']}, "
    return f"{time} {entry['asked']}{round}: {sent}{entry['bytes_sent']:,} bytes ({entry['rule']})"


def _describe_proposal(home: SiteHome, digest: str) -> str:
    """A proposed plan in one line, or which file is damaged."""
    try:
        plan = home.read_plan(digest)
    except ValueError as error:
        return f"{digest[:12]}  {error}"
    assert plan is not None
    recipe = plan.recipe
    has_budget = recipe.epsilon is not None and math.isfinite(recipe.epsilon)
    budget = f"epsilon {recipe.epsilon:g}" if has_budget else "no guarantee"
    is_admitted = any(run["plan"] == digest for run in home.read_runs().values())
    # A plan that the policy allows runs without a decision.
    decision = home.find_decision(digest) or ("admitted" if is_admitted else "undecided")
    proposed = home.read_proposal_time(digest).strftime("%Y-%m-%d %H:%M")
    return f"{digest[:12]}  {decision:<9}  {proposed}  {recipe.method}, {recipe.cycles} cycles, {budget}"


def _open_home(state: Path) -> SiteHome:
    if not state.is_dir():
        raise ValueError(f"{state} is no folder; give the site's state folder, as in --node-config")
    return SiteHome(state)
