"""The shell face of the data: what is there, fetch the rest, verify it, count it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from fedauc.data import Dataset, datasets
from fedauc.data.cache import read, recorded
from fedauc.data.downloads import fetch as download
from fedauc.data.sources import Absent, File, Source, Stored, check, digest, home, shelves
from fedauc.data.statistics import PAPER, Count, statistics
from fedauc.discovery import lookup
from fedauc.reports.caveats import caveat_sentence
from fedauc.reports.tables import format_bytes

app = typer.Typer(no_args_is_help=True, help="Look after the files that datasets need.", rich_markup_mode="rich")

THERE = "`there`: under the right names, not checked; `fedauc data verify` reads the contents"

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
    stored, wrong, there = _find_stored_datasets(names, folder), 0, False
    for dataset in stored:
        try:
            lines = _describe_files(dataset)
            there |= not _find_absent_sources(dataset)
        except (ValueError, OSError) as error:
            lines, wrong = [_prefix_name(dataset, error)], wrong + 1
        print("\n".join(lines))
    if there:
        print(THERE)
    if not names:
        print(f"need no files here: {', '.join(sorted(set(datasets()) - {dataset.name for dataset in stored}))}")
    if wrong:
        raise typer.Exit(2)


@app.command()
def fetch(names: Annotated[list[str], typer.Argument(help="Datasets.")], folder: Folder = "") -> None:
    """Download what a dataset needs and is not there; goes on where a broken download stopped.

    Example: [bold]fedauc data fetch cifar10 cifar100[/bold]
    """
    for dataset in _find_stored_datasets(names, folder):
        for source in _find_absent_sources(dataset):
            _download_source(dataset, source)
        files = dataset.files()
        for file in files:
            check(file)
        unknown = sum(not file.checksum for file in files)
        print(f"{dataset.name}: {_describe_unverified(dataset, unknown) if unknown else 'complete'}")


@app.command()
def verify(names: Names = None, folder: Folder = "") -> None:
    """Check every file that is there against its checksum; exit code 2 if one is wrong, 1 if there is none.

    A file without one is read whole, or compared with what was read when it was first used.

    Example: [bold]fedauc data verify cifar10[/bold]
    """
    found: list[bool | None] = []
    for dataset in _find_stored_datasets(names, folder):
        for line, right in _check_dataset(dataset):
            print(_prefix_name(dataset, line))
            found.append(right)
    if False in found:
        raise typer.Exit(2)
    if True not in found:
        of = ", ".join(names or ["any dataset"])
        print(f"nothing to verify in {home(folder)}: no file of {of} is there; get them, or name another --folder")
        raise typer.Exit(1)


@app.command()
def stats(
    names: Names = None, folder: Folder = "", seed: Annotated[int, typer.Option("--seed", help="Data seed.")] = 0
) -> None:
    """Count the positives and negatives of each part, as in the paper's table of data statistics.

    Example: [bold]fedauc data stats cifar10 cifar100[/bold]
    """
    table = _make_table("dataset", "part", "positives", "negatives", "positive %", "paper")
    notes: list[str] = []
    wrong: list[str] = []
    foreign: list[str] = []
    for name, kind in [(name, lookup("dataset", name, datasets())) for name in names or PAPER]:
        try:
            found = statistics(_make_dataset(kind, folder), seed)
        except (ValueError, OSError) as error:
            (notes if isinstance(error, Absent) and not names else wrong).append(str(error))
            continue
        for part, count in found.items():
            table.add_row(name, part, *_format_count(count), _compare_with_paper(name, part, count))
        foreign += [caveat_sentence(name, kind.foreign)] if kind.foreign else []
    if table.rows:
        Console().print(table)
    for note in (*foreign, *notes):
        print(note)
    for reason in wrong:
        print(f"error: {reason}", file=sys.stderr)
    if wrong:
        raise typer.Exit(2)


def _describe_files(dataset: Stored) -> list[str]:
    """What is there of a dataset, and where the rest comes from."""
    try:
        sizes = {file.path: file.path.stat().st_size for file in dataset.files()}
    except Absent as absent:
        lacks = f"{dataset.name}: lacks {len(absent.sources)} of {len(dataset.sources)} files"
        sources = [f"  {source.name}  {source.url or source.page}" for source in absent.sources]
        return [lacks, *sources, *([f"  {absent.also}"] if absent.also else [])]
    if empty := [path for path, count in sizes.items() if not count]:
        raise ValueError(f"{empty[0]} is empty; delete it and fetch it again")
    return [f"{dataset.name}: there ({format_bytes(sum(sizes.values()))})"]


def _describe_unverified(dataset: Stored, files: int) -> str:
    none = f"{files} of its files have no published checksum"
    return f"fetched, not verified: {none}; run `fedauc data verify {dataset.name}`"


def _prefix_name(dataset: Stored, said: object) -> str:
    return f"{dataset.name}: {str(said).removeprefix(f'{dataset.name} ')}"


def _format_count(count: Count) -> tuple[str, str, str]:
    return f"{count.positives:,}", f"{count.negatives:,}", f"{100 * count.positives / sum(count):.2f}"


def _compare_with_paper(name: str, part: str, count: Count) -> str:
    if name not in PAPER:
        return "-"
    paper: Count = getattr(PAPER[name], part)
    return "the same" if paper == count else f"{paper.positives:,} / {paper.negatives:,}"


class Verdict(NamedTuple):
    """A line on a file, a parsed folder or a whole dataset, and whether it is right; None where nothing is there."""

    line: str
    right: bool | None


def _check_dataset(dataset: Stored) -> Iterator[Verdict]:
    """What is wrong with a dataset as a whole, then each file that is there, then each parsed folder."""
    made_from: dict[str, str] | None = None
    whole: Verdict | None = None
    try:
        if not all(file.checksum for file in dataset.files()):
            # Only reading all of it tells whether it is right, and only what was read then, whether it still is.
            dataset.load(0)
            made_from = recorded(dataset.place())
    except (ValueError, OSError) as error:
        whole = Verdict(str(error), None if isinstance(error, Absent) else False)
        yield whole
    for source, file in dataset.there():
        # The first wrong file may be what is wrong with the whole.
        if (found := _make_verdict(partial(_check_file, dataset, source, file, made_from))) != whole:
            yield found
    for folder in _find_parsed_folders(dataset):
        yield _make_verdict(partial(_check_parsed_folder, folder))


def _make_verdict(judge: Callable[[], str]) -> Verdict:
    try:
        return Verdict(judge(), True)
    except (ValueError, OSError) as error:
        return Verdict(str(error), False)


def _check_file(dataset: Stored, source: Source, file: File, made_from: dict[str, str] | None) -> str:
    check(file)
    if file.checksum:
        return f"{file.path} is right"
    if made_from is None:
        dataset.examine(source, file.path)
    found = digest(file.path)
    if made_from is not None and made_from.get(file.path.name) != found:
        remedy = "fetch it again, or delete the parsed folder"
        raise ValueError(f"{file.path} is not what was parsed: its {found}; {remedy}")
    return f"{file.path} has no published checksum; its {found}"


def _check_parsed_folder(folder: Path) -> str:
    read(folder)
    return f"{folder} is right"


def _find_parsed_folders(dataset: Stored) -> Iterator[Path]:
    """The parsed folders of a dataset, right or wrong; their names end in a fingerprint."""
    own = re.compile(rf"{re.escape(dataset.name)}-[0-9a-f]{{12}}")
    for shelf in shelves(dataset.home):
        yield from sorted(path for path in shelf.glob("*") if own.fullmatch(path.name))


def _find_absent_sources(dataset: Stored) -> list[Source]:
    """What to download: nothing if the dataset is complete in some form, else the sources that are not there."""
    try:
        dataset.files()
    except Absent as absent:
        return list(absent.sources)
    return []


def _download_source(dataset: Stored, source: Source) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        bar = bars.add_task(source.name, total=None)
        download(
            source,
            dataset.home,
            lambda done, total: bars.update(bar, completed=done, total=total),
            partial(dataset.looks_right, source),
        )


def _find_stored_datasets(names: list[str] | None, folder: str) -> list[Stored]:
    if home(folder).exists() and not home(folder).is_dir():
        raise ValueError(f"folder is {home(folder)}, which is a file: name a folder")
    known = {name: kind for name, kind in datasets().items() if issubclass(kind, Stored)}
    return [lookup("dataset with files", name, known)(folder=folder) for name in names or known]


def _make_dataset(kind: type[Dataset], folder: str) -> Dataset:
    lacks = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
    if lacks:
        needs = f"{kind.name} has no counts of its own: it needs {', '.join(lacks)}"
        raise ValueError(f"{needs}; use `fedauc run --data {kind.name} --data.{lacks[0]} ...`")
    return kind(folder=folder) if issubclass(kind, Stored) else kind()


def _make_table(*headers: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for header in headers:
        table.add_column(header, overflow="fold", justify="right" if header in ("positives", "negatives") else "left")
    return table
