"""The commands that look at runs: report, watch, board."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from fedauc.cli.lazy_import import finish_imports

RunFolders = Annotated[
    list[Path],
    typer.Argument(help="Folders that run, compare, sweep or a federation made.", show_default=False, metavar="DIR..."),
]


RunsFolder = Annotated[
    Path, typer.Argument(help="A folder that run, compare, sweep or a federation made.", show_default=False)
]


def report(
    folders: RunFolders,
    out: Annotated[
        Path | None, typer.Option("--out", help="The page; report.html in the first folder unless given.")
    ] = None,
    formats: Annotated[
        str, typer.Option("--format", metavar="pdf,svg,png", help="Also write the figures as files, in these formats.")
    ] = "",
    latex: Annotated[bool, typer.Option("--latex", help="Also write the tables as LaTeX files.")] = False,
) -> None:
    """Write one HTML page about runs: answer, curves, sites, participation, thresholds, traffic, settings.

    Example: [bold]fedauc report runs/first --out report.html --format pdf --latex[/bold]
    """
    finish_imports()

    from fedauc.files import naming_damage, write_atomically
    from fedauc.reports.figure_files import read_formats, write_figures
    from fedauc.reports.latex import write_latex_tables
    from fedauc.reports.page import render_page
    from fedauc.reports.report_runs import read_report_runs

    known_formats, path = read_formats(formats), out or folders[0] / "report.html"
    with naming_damage(folders[0]):
        runs = read_report_runs(folders)
        page = render_page(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page.encode())
    print(path)
    if known_formats:
        folder = path.with_name(f"{path.stem}_figures")
        print(f"{folder}: {len(write_figures(runs, folder, known_formats))} files")
    if latex:
        folder = path.with_name(f"{path.stem}_tables")
        print(f"{folder}: {len(write_latex_tables(runs, folder))} files")


def watch(folder: RunsFolder) -> None:
    """Show how far runs are while another process trains them, until all are over.

    Example: [bold]fedauc watch runs/first[/bold]
    """
    finish_imports()

    from fedauc.reports.watch import watch_folder

    if not folder.exists():
        raise ValueError(f"{folder} does not exist; give the folder of a run that has been started")
    with suppress(KeyboardInterrupt):
        watch_folder(folder)


def board(
    folders: RunFolders,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")
    ] = 8765,
) -> None:
    """Serve the report page on this machine, updating itself while runs go on; Ctrl-C ends it.

    Example: [bold]fedauc board runs/first --port 8765[/bold]
    """
    finish_imports()

    from fedauc.reports.board import make_server

    with make_server(folders, port) as server, suppress(KeyboardInterrupt):
        print(f"http://127.0.0.1:{server.server_address[1]}/ shows {', '.join(map(str, folders))}; Ctrl-C ends it")
        server.serve_forever()


COMMANDS: dict[str, Callable[..., None]] = {"report": report, "watch": watch, "board": board}
"""The commands of this module, in the order in which help lists them."""
