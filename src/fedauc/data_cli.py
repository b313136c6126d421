"""The shell face of the data: what is there, fetch the rest, verify it, count it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from fedauc.data import Dataset, datasets
from fedauc.data.cache import MANIFEST, read
from fedauc.data.downloads import fetch as download
from fedauc.data.sources import Absent, File, Source, Stored, check, digest, home
from fedauc.data.statistics import PAPER, Count, statistics
from fedauc.discovery import lookup
from fedauc.reports.tables import size

app = typer.Typer(no_args_is_help=True, help="Look after the files that datasets need.", rich_markup_mode="rich")

Names = Annotated[list[str] | None, typer.Argument(help="Datasets; every one by default.", show_default=False)]
Folder = Annotated[
    str, typer.Option("--folder", help="Where the files lie; $FEDAUC_DATA or ~/.cache/fedauc by default.")
]


@app.command()
def status(names: Names = None, folder: Folder = "") -> None:
    """Say which datasets are there, and where the rest comes from.

    Example: [bold]fedauc data status[/bold]
    """
    print(f"folder: {home(folder)}")
    stored = _stored(names, folder)
    for dataset in stored:
        absent = _absent(dataset)
        if not absent:
            sizes = [file.path.stat().st_size for file in dataset.files()]
            print(f"{dataset.name}: there ({size(sum(sizes))})")
            continue
        print(f"{dataset.name}: lacks {len(absent)} of {len(dataset.sources)} files")
        for source in absent:
            print(f"  {source.name}  {source.url or source.page}")
    if not names:
        print(f"need no files here: {', '.join(sorted(set(datasets()) - {dataset.name for dataset in stored}))}")


@app.command()
def fetch(names: Annotated[list[str], typer.Argument(help="Datasets.")], folder: Folder = "") -> None:
    """Download what a dataset needs and is not there; goes on where a broken download stopped.

    Example: [bold]fedauc data fetch cifar10 cifar100[/bold]
    """
    wanted = [source for dataset in _stored(names, folder) for source in _absent(dataset)]
    for source in dict.fromkeys(wanted):
        _download(source, home(folder))
    for dataset in _stored(names, folder):
        for file in dataset.files():
            check(file)
        print(f"{dataset.name}: complete")


@app.command()
def verify(names: Names = None, folder: Folder = "") -> None:
    """Check every file that is there against its published checksum; exit code 2 if one is wrong.

    Example: [bold]fedauc data verify cifar10[/bold]
    """
    wrong = 0
    for dataset in _stored(names, folder):
        for line, right in _verdicts(dataset):
            print(f"{dataset.name}: {line.removeprefix(f'{dataset.name} ')}")
            wrong += not right
    if wrong:
        raise typer.Exit(2)


@app.command()
def stats(
    names: Names = None, folder: Folder = "", seed: Annotated[int, typer.Option("--seed", help="Data seed.")] = 0
) -> None:
    """Count the positives and negatives of each part, as in the paper's table of data statistics.

    Example: [bold]fedauc data stats cifar10 cifar100[/bold]
    """
    table, notes = _table("dataset", "part", "positives", "negatives", "positive %", "paper"), []
    for name in names or PAPER:
        dataset = _dataset(name, folder)
        try:
            found = statistics(dataset, seed)
        except Absent as error:
            if names:
                raise
            notes.append(str(error))
            continue
        for part, count in found.items():
            table.add_row(name, part, *_row(count), _beside(name, part, count))
    if table.rows:
        Console().print(table)
    for note in notes:
        print(note)


def _row(count: Count) -> tuple[str, str, str]:
    return f"{count.positives:,}", f"{count.negatives:,}", f"{100 * count.positives / sum(count):.2f}"


def _beside(name: str, part: str, count: Count) -> str:
    if name not in PAPER:
        return "-"
    paper: Count = getattr(PAPER[name], part)
    return "the same" if paper == count else f"{paper.positives:,} / {paper.negatives:,}"


def _verdicts(dataset: Stored) -> Iterator[tuple[str, bool]]:
    """A line for each file and each parsed folder of a dataset, and whether it is right."""
    try:
        found = dataset.files()
    except Absent as absent:
        yield str(absent), True
        return
    for file in found:
        yield _verdict(file)
    if not all(file.checksum for file in found):
        # Without a checksum, only reading all of it tells.
        try:
            dataset.parsed()
        except ValueError as error:
            yield str(error), False
    for manifest in sorted((dataset.home / "parsed").glob(f"{dataset.name}-*/{MANIFEST}")):
        try:
            read(manifest.parent)
            yield f"{manifest.parent} is right", True
        except ValueError as error:
            yield str(error), False


def _verdict(file: File) -> tuple[str, bool]:
    try:
        check(file)
    except ValueError as error:
        return str(error), False
    if file.checksum:
        return f"{file.path} is right", True
    return f"{file.path} has no published checksum; its {digest(file.path)}", True


def _absent(dataset: Stored) -> list[Source]:
    """What to download: nothing if the dataset is complete in some form, else the sources that are not there."""
    try:
        dataset.files()
    except Absent as absent:
        return list(absent.sources)
    return []


def _download(source: Source, folder: Path) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        bar = bars.add_task(source.name, total=None)
        download(source, folder, lambda done, total: bars.update(bar, completed=done, total=total))


def _stored(names: list[str] | None, folder: str) -> list[Stored]:
    known = {name: kind for name, kind in datasets().items() if issubclass(kind, Stored)}
    return [lookup("dataset with files", name, known)(folder=folder) for name in names or known]


def _dataset(name: str, folder: str) -> Dataset:
    kind = lookup("dataset", name, datasets())
    return kind(folder=folder) if issubclass(kind, Stored) else kind()


def _table(*headers: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for header in headers:
        table.add_column(header, overflow="fold", justify="right" if header in ("positives", "negatives") else "left")
    return table
