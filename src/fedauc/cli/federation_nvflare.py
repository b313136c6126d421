"""The commands `fedauc federation nvflare`: the files of a project, of a participant and of a job on NVFlare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedauc.federation.app_settings import read_settings
from fedauc.federation.nvflare_federation import allow_fedauc, write_job, write_project

app = typer.Typer(no_args_is_help=True, help="The same rounds on NVFlare.")


@app.command()
def project(
    path: Annotated[Path, typer.Argument(help="The file to write.", show_default=False)],
    sites: Annotated[str, typer.Option("--sites", metavar="name,...", help="The sites.", show_default=False)],
    server: Annotated[str, typer.Option("--server", help="The server's host name.", show_default=False)],
    admin: Annotated[str, typer.Option("--admin", metavar="EMAIL", help="Who submits jobs.", show_default=False)],
    port: Annotated[int, typer.Option("--port", help="The server's port.")] = 8002,
) -> None:
    """Write the project from which `nvflare provision` makes a startup kit per participant.

    Example: [bold]fedauc federation nvflare project project.yml --sites north,south --server fed.example.org
    --admin lead@example.org[/bold]
    """
    if path.exists():
        raise ValueError(f"{path} exists already; choose another name")
    write_project(path, [name.strip() for name in sites.split(",") if name.strip()], server, admin, port)
    print(f"wrote {path}: make the startup kits with `nvflare provision -p {path} -w kits`")


@app.command()
def allow(
    kit: Annotated[Path, typer.Argument(help="The folder of a startup kit.", show_default=False)],
    data: Annotated[Path | None, typer.Option("--data", help="A site's table, or its folder of arrays.")] = None,
    state: Annotated[Path | None, typer.Option("--state", help="A site's state folder.")] = None,
    policy: Annotated[Path | None, typer.Option("--policy", help="A site's policy file.")] = None,
) -> None:
    """Let jobs at the server, or at a site, use fedauc; a site also says where its rows, state and policy are.

    Example: [bold]fedauc federation nvflare allow kits/north --data /data/rows.csv --state /data/fedauc[/bold]
    """
    options = {"data": data, "state": state, "policy": policy}
    paths = {name: str(path.absolute()) for name, path in options.items() if path is not None}
    if paths and not {"data", "state"} <= paths.keys():
        raise ValueError(f"a site needs --data and --state, but only {', '.join(paths)} is given: give both, or none")
    allow_fedauc(kit, paths or None)
    print(f"jobs at {kit.name} may use fedauc")


@app.command()
def job(
    folder: Annotated[Path, typer.Argument(help="The job's folder to write.", show_default=False)],
    sites: Annotated[Path, typer.Option("--sites", help="The site table, on the server.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="The run's folder, on the server.", show_default=False)],
    run_config: Annotated[
        str, typer.Option("--run-config", metavar="'k=v ...'", help="The settings of the run, as with Flower.")
    ] = 'method="cycp-pairwise"',
    min_sites: Annotated[int, typer.Option("--min-sites", min=0, help="End the job below; 0 means all sites.")] = 0,
) -> None:
    """Write a job for `nvflare job submit`: one run, or with resume=true the rest of one.

    Example: [bold]fedauc federation nvflare job jobs/first --sites sites.toml --out /srv/fed/run --run-config
    'method="cycp-pairwise" cycles=20'[/bold]
    """
    paths = {"sites": str(sites.absolute()), "out": str(out.absolute())}
    write_job(folder, {**read_settings(run_config), **paths}, min_sites)
    print(f"wrote {folder}: start it with `nvflare job submit -j {folder} --startup-kit KIT`, the administrator's kit")
