"""`fedauc federation`: write an app, try it on this machine, go on after a crash, look at a run."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Annotated

import typer

from fedauc.federation.apps import make_app
from fedauc.federation.demo import deal_demo
from fedauc.federation.local import Trial
from fedauc.federation.watching import follow, quality, summary
from fedauc.guards import TrainingStopped

app = typer.Typer(no_args_is_help=True, help="The same algorithms across machines, on Flower.")

Folder = Annotated[Path, typer.Argument(help="The app's folder.", show_default=False)]
Settings = Annotated[
    str, typer.Option("--run-config", metavar="'k=v ...'", help="Settings of the app's pyproject.toml.")
]


@app.command()
def init(
    folder: Folder,
    sites: Annotated[str, typer.Option("--sites", metavar="name=group,...", help="Who takes part.")],
    hosts: Annotated[str, typer.Option("--hosts", help="The server's names or addresses.")] = "localhost,127.0.0.1",
) -> None:
    """Write a Flower app, its certificates and keys, and the server's table of sites.

    Example: [bold]fedauc federation init hospitals --sites north=day,south=night --hosts fed.example.org[/bold]
    """
    make_app(folder, _table(sites), _list("hosts", hosts))
    print(f"wrote {folder}: start with {folder / 'README.md'}")


@app.command()
def local(
    out: Annotated[Path, typer.Option("--out", help="The folder to make.", show_default=False)],
    sites: Annotated[int, typer.Option("--sites", min=2, help="How many sites share the demo data.")] = 4,
    groups: Annotated[int, typer.Option("--groups", min=1, help="How many groups take turns.")] = 3,
    run_config: Settings = "",
) -> None:
    """Start a SuperLink, SuperNodes and a run on this machine, with TLS and keys; stop them when the run is over.

    Example: [bold]fedauc federation local --sites 4 --run-config "cycles=2" --out trial[/bold]
    """
    if groups > sites:
        raise ValueError(f"groups is {groups}; it must be at most the {sites} sites")
    names = {f"site-{number:03d}": f"group-{number % groups}" for number in range(sites)}
    make_app(out, names)
    deal_demo(out / "sites", list(names))
    _go(out, list(names), run_config)


@app.command()
def resume(folder: Folder, run_config: Settings = "") -> None:
    """Go on with a local trial from its last finished round.

    Example: [bold]fedauc federation resume trial[/bold]
    """
    if not (folder / "run" / "federation.json").is_file():
        raise ValueError(
            f"{folder} holds no run to go on with; start one with `fedauc federation local --out {folder}`"
        )
    names = sorted(path.name for path in (folder / "sites").iterdir())
    _go(folder, names, f"resume=true {run_config}".strip())


@app.command()
def show(folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print how a federated run went: AUC, rounds, traffic, and who came how often.

    Example: [bold]fedauc federation show trial[/bold]
    """
    found = summary(folder / "run" if (folder / "run").is_dir() else folder)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['status']}, {found['done']} of {found['rounds']} rounds")
    for line in found["records"][-1:]:
        print(quality(line))
    for name, counts in found["attendance"].items():
        print(f"{name}: came {counts['came']}, away {counts['away']}, refused {counts['refused']}")


def _go(folder: Path, names: list[str], settings: str) -> None:
    """Everything up, the run, live lines, everything down."""
    # Being told to end must stop what was started, as an interrupt from the keyboard does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Trial(folder) as trial:
        trial.link()
        print(f"SuperLink on 127.0.0.1:{trial.port}, logs in {trial.folder / 'logs'}")
        for name in names:
            trial.register(name)
            home = trial.folder / "sites" / name
            trial.node(name, {"data": str(home / "rows"), "state": str(home / "state")})
        trial.run(settings)
        follow(trial.folder / "run", lambda: trial.running("run"))
    found = summary(folder / "run") if (folder / "run" / "gathered.json").is_file() else {"status": "not started"}
    if found["status"] != "done":
        raise TrainingStopped(f"the run is {found['status']}; see {folder / 'logs' / 'run.log'}, then resume")
    show(folder)


def _table(text: str) -> dict[str, str]:
    found = {}
    for pair in _list("sites", text):
        name, _, group = pair.partition("=")
        if name in found:
            raise ValueError(f"sites lists {name!r} twice; list each once")
        found[name] = group
    return found


def _list(what: str, text: str) -> list[str]:
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise ValueError(f"{what} is {text!r}; it must list at least 1")
    return found
