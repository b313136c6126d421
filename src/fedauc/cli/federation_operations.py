"""The commands of `fedauc federation` for who runs its machines: deployment, certificates and replace-key."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

from fedauc.federation.agreement import read_sites
from fedauc.federation.certificate_renewal import (
    EXPIRY_DAYS,
    check_own_address,
    find_expiring,
    finish_renewal,
    list_certificates,
    prepare_renewal,
    read_server_host,
    switch_certificate,
)
from fedauc.federation.deploy_folder import (
    DEFAULT_IMAGE,
    DEFAULT_PORT,
    DEPLOY_FOLDER,
    SUPERLINK,
    Deployment,
    write_deploy_folder,
)
from fedauc.federation.key_rotation import replace_site_key
from fedauc.federation.local_federation import run_flwr
from fedauc.federation.schema import SCHEMA_FILE

app = typer.Typer()

Folder = Annotated[Path, typer.Argument(help="The app's folder.", show_default=False)]


@app.command()
def deployment(
    folder: Folder,
    host: Annotated[
        str, typer.Option("--host", help="The server's name; that of its certificate unless given.", show_default=False)
    ] = "",
    port: Annotated[int, typer.Option("--port", help="The server's port.")] = DEFAULT_PORT,
    image: Annotated[str, typer.Option("--image", help="The container image.")] = DEFAULT_IMAGE,
    replace: Annotated[bool, typer.Option("--replace", help="Also replace files that were changed.")] = False,
) -> None:
    """Write the folder deploy/ of an app: image, compose files, Kubernetes manifests and systemd units.

    Call it again after a site has been added to the site table, or for another host, port or image.

    Example: [bold]fedauc federation deployment hospitals --image registry.example.org/fedauc:0.3.0[/bold]
    """
    _need_app(folder)
    sites = [site.name for site in read_sites(folder / "sites.toml")]
    has_schema = (folder / SCHEMA_FILE).is_file()
    settings = Deployment(folder.absolute(), sites, host or read_server_host(folder), port, image, has_schema)
    unchanged_files = write_deploy_folder(folder, settings, replace)
    print(f"wrote {folder / DEPLOY_FOLDER} for {settings.host}:{port} and {len(sites)} sites")
    for path in unchanged_files:
        print(f"kept {path}, which differs; --replace writes it anew")


@app.command()
def certificates(
    folder: Folder,
    prepare: Annotated[bool, typer.Option("--prepare", help="Let sites trust the next authority, too.")] = False,
    switch: Annotated[bool, typer.Option("--switch", help="Let the server use the next certificate.")] = False,
    finish: Annotated[bool, typer.Option("--finish", help="Let sites trust the new authority alone.")] = False,
) -> None:
    """Print when certificates expire (exit code 2 if soon), or renew the server's in three steps.

    The first step makes a certificate of a new trial authority, unless certificates/next/ holds one of your own.

    Example: [bold]fedauc federation certificates hospitals --prepare[/bold]
    """
    _need_app(folder)
    steps = [
        step
        for step, is_asked in ((prepare_renewal, prepare), (switch_certificate, switch), (finish_renewal, finish))
        if is_asked
    ]
    if len(steps) > 1:
        raise ValueError("give one of --prepare, --switch and --finish; they are three steps, with work between them")
    if steps:
        print(steps[0](folder))
        return
    now = datetime.datetime.now(datetime.UTC)
    entries = [
        entry for name in ("ca.pem", "server.pem") for entry in list_certificates(folder / "certificates" / name)
    ]
    for entry in entries:
        print(f"{entry.file:<11} {entry.subject}, valid until {entry.end:%Y-%m-%d} ({entry.days_left(now)} days)")
    if (folder / "certificates" / "next").is_dir():
        print("a renewal is under way")
    if expiring := find_expiring(entries, now):
        left = f"{expiring[0].file} has {expiring[0].days_left(now)} days left"
        raise ValueError(f"{left}, and {EXPIRY_DAYS} are needed: begin a renewal with --prepare")
    check_own_address(folder)


@app.command(name="replace-key")
def replace_key(
    folder: Folder,
    site: Annotated[str, typer.Argument(help="The site's name.", show_default=False)],
    public_key: Annotated[Path, typer.Argument(help="The new public key, NAME.pub.", show_default=False)],
    superlink: Annotated[str, typer.Argument(help="The SuperLink's name in Flower's config.toml.")] = SUPERLINK,
) -> None:
    """Replace a site's key: register the new one, write it into the site table, and unregister the old one.

    Stop a run before, and resume it afterwards. Then start the site with its new private key.

    Example: [bold]fedauc federation replace-key hospitals north north-2027.pub[/bold]
    """
    _need_app(folder)
    for line in replace_site_key(folder, site, public_key, superlink, run_flwr):
        print(line)
    print(f"start {site} with its new private key, and resume the run")


def _need_app(folder: Path) -> None:
    if not (folder / "sites.toml").is_file():
        raise ValueError(f"{folder} is no app: it has no sites.toml; give the folder that `init` made")
