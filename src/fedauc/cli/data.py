"""The command `fedauc data`: which dataset files exist, downloads, checks, class counts, and your own table."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from fedauc.data import Dataset, Preparation, find_datasets, prepare_table
from fedauc.data.datasets.table import Table as OwnTable
from fedauc.data.description import describe_data, list_data_notes
from fedauc.data.example_table import encode_claims
from fedauc.data.io.downloads import download_file
from fedauc.data.io.stored import (
    File,
    MissingFiles,
    Source,
    StoredDataset,
    cache_folders,
    check_file,
    file_digest,
    read_parsed,
    recorded_sources,
    resolve_folder,
)
from fedauc.data.partitions import IID
from fedauc.data.statistics import PAPER_COUNTS, ClassCounts, count_classes
from fedauc.discovery import lookup
from fedauc.files import write_atomically
from fedauc.reports.caveats import caveat_sentence
from fedauc.reports.tables import format_bytes

app = typer.Typer(no_args_is_help=True, help="Manage the files that datasets need.", rich_markup_mode="rich")

PRESENT = "`present`: files with the right names exist, not checked; `fedauc data verify` reads their contents"

Names = Annotated[list[str] | None, typer.Argument(help="Datasets; all by default.", show_default=False)]
Folder = Annotated[
    str, typer.Option("--folder", help="Folder of the files; $FEDAUC_DATA or ~/.cache/fedauc by default.")
]


@app.command("status")
def show_status(names: Names = None, folder: Folder = "") -> None:
    """Show which datasets are present, and where to get the others.

    Example: [bold]fedauc data status[/bold]
    """
    print(f"folder: {resolve_folder(folder)}")
    chosen, any_wrong, any_present = _stored_datasets(names, folder), False, False
    for dataset in chosen:
        try:
            sizes = {file.path: file.path.stat().st_size for file in dataset.find_files()}
            if empty := [path for path, size in sizes.items() if not size]:
                raise ValueError(f"{empty[0]} is empty; delete it and fetch it again")
            print(f"{dataset.name}: present ({format_bytes(sum(sizes.values()))})")
            any_present = True
        except MissingFiles as missing:
            print(f"{dataset.name}: lacks {len(missing.sources)} of {len(dataset.sources)} files")
            for source in missing.sources:
                print(f"  {source.name}  {source.url or source.page}")
            if missing.partial:
                print(f"  {missing.partial}")
        except (ValueError, OSError) as error:
            print(_prefix_dataset(dataset, error))
            any_wrong = True
    if any_present:
        print(PRESENT)
    if not names:
        fileless = sorted(set(find_datasets()) - {dataset.name for dataset in chosen})
        print(f"need no files here: {', '.join(fileless)}")
    if any_wrong:
        raise typer.Exit(2)


@app.command("fetch")
def fetch_datasets(names: Annotated[list[str], typer.Argument(help="Datasets.")], folder: Folder = "") -> None:
    """Download the missing files of datasets; a broken download continues where it stopped.

    Example: [bold]fedauc data fetch cifar10 cifar100[/bold]
    """
    for dataset in _stored_datasets(names, folder):
        try:
            files = dataset.find_files()
        except MissingFiles as missing:
            for source in missing.sources:
                _download_source(dataset, source)
            files = dataset.find_files()
        for file in files:
            check_file(file)
        outcome = "complete"
        if unpublished := sum(not file.checksum for file in files):
            reason = f"{unpublished} of its files have no published checksum"
            outcome = f"fetched, not verified: {reason}; run `fedauc data verify {dataset.name}`"
        print(f"{dataset.name}: {outcome}")


@app.command("verify")
def verify_datasets(names: Names = None, folder: Folder = "") -> None:
    """Check every existing file against its checksum; exit code 2 if one is wrong, 1 if there is none.

    A file without a published checksum is read completely, or compared with its checksum at first use.

    Example: [bold]fedauc data verify cifar10[/bold]
    """
    verdicts: list[bool | None] = []
    for dataset in _stored_datasets(names, folder):
        for line, is_right in _verify_dataset(dataset):
            print(_prefix_dataset(dataset, line))
            verdicts.append(is_right)
    if False in verdicts:
        raise typer.Exit(2)
    if True not in verdicts:
        chosen = ", ".join(names or ["any dataset"])
        reason = f"no file of {chosen} is there; get them, or name another --folder"
        print(f"nothing to verify in {resolve_folder(folder)}: {reason}")
        raise typer.Exit(1)


@app.command("stats")
def show_statistics(
    names: Names = None, folder: Folder = "", seed: Annotated[int, typer.Option("--seed", help="Data seed.")] = 0
) -> None:
    """Count the positives and negatives of each part, as in the paper's table of data statistics.

    Example: [bold]fedauc data stats cifar10 cifar100[/bold]
    """
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for header in ("dataset", "part", "positives", "negatives", "positive %", "paper"):
        table.add_column(header, overflow="fold", justify="right" if header in ("positives", "negatives") else "left")
    caveats: list[str] = []
    missing: list[str] = []
    errors: list[str] = []
    for name, kind in [(name, lookup("dataset", name, find_datasets())) for name in names or PAPER_COUNTS]:
        try:
            counts = count_classes(_default_dataset(kind, folder), seed)
        except (ValueError, OSError) as error:
            (missing if isinstance(error, MissingFiles) and not names else errors).append(str(error))
            continue
        for part, count in counts.items():
            paper, percentage = "-", f"{100 * count.positives / sum(count):.2f}"
            if name in PAPER_COUNTS:
                expected: ClassCounts = getattr(PAPER_COUNTS[name], part)
                paper = "the same" if expected == count else f"{expected.positives:,} / {expected.negatives:,}"
            table.add_row(name, part, f"{count.positives:,}", f"{count.negatives:,}", percentage, paper)
        caveats += [caveat_sentence(name, kind.caveat)] if kind.caveat else []
    if table.rows:
        Console().print(table)
    for note in (*caveats, *missing):
        print(note)
    for reason in errors:
        print(f"error: {reason}", file=sys.stderr)
    if errors:
        raise typer.Exit(2)


@app.command("example")
def write_example(
    path: Annotated[Path, typer.Argument(help="The CSV file to write; it must not exist.")],
    rows: Annotated[int, typer.Option("--rows", help="Number of claims.", min=100)] = 8000,
    seed: Annotated[int, typer.Option("--seed", help="Another seed gives other claims.")] = 0,
    label: Annotated[bool, typer.Option("--label/--no-label", help="Whether to write the label column.")] = True,
) -> None:
    """Write a synthetic table of insurance claims, to try the other commands on.

    The label is the column `fraud` (yes, no), and `state` is the site of a claim.

    Example: [bold]fedauc data example claims.csv[/bold]
    """
    if path.exists():
        raise ValueError(f"{path} exists already; name another file")
    write_atomically(path, encode_claims(rows, seed, label))
    print(f"{path}: {rows:,} synthetic claims")


@app.command("describe")
def describe_table(
    path: Annotated[Path, typer.Argument(help="The table: CSV, JSON lines, Parquet or Arrow.")],
    label: Annotated[str, typer.Option("--label", help="Column with the labels.")] = "y",
    positive: Annotated[str, typer.Option("--positive", help="The label value that counts as positive.")] = "",
    client: Annotated[str, typer.Option("--client", help="Column with the site of a row; empty for none.")] = "client",
    features: Annotated[str, typer.Option("--features", metavar="a,b,...", help="Columns to use; all others.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a run would make of your own table: rows, positives, sites, features, columns left out and why.

    Example: [bold]fedauc data describe claims.csv --label fraud --positive yes --client state[/bold]
    """
    chosen = tuple(name for name in features.split(",") if name)
    table = OwnTable(path, label=label, positive=positive, client=client, features=chosen)
    preparation = Preparation() if client else Preparation(IID(1))
    split = prepare_table(table.load(0), preparation, 0)
    if as_json:
        print(json.dumps(describe_data(split), indent=2))
    else:
        for note in list_data_notes(split):
            print(note)


def _prefix_dataset(dataset: StoredDataset, message: object) -> str:
    return f"{dataset.name}: {str(message).removeprefix(f'{dataset.name} ')}"


def _verify_dataset(dataset: StoredDataset) -> Iterator[tuple[str, bool | None]]:
    """What is wrong with the dataset as a whole, then each existing file, then each parsed folder.

    Every line comes with whether what it describes is right; None where there is nothing.
    """
    checksums: dict[str, str] | None = None
    overall: tuple[str, bool | None] | None = None
    try:
        if not all(file.checksum for file in dataset.find_files()):
            # Without published checksums, loading shows whether the files are right, and the checksums that were
            # recorded at first use show whether they have changed since.
            dataset.load(0)
            checksums = recorded_sources(dataset.parsed_folder())
    except (ValueError, OSError) as error:
        overall = str(error), None if isinstance(error, MissingFiles) else False
        yield overall
    for source, file in dataset.existing_files():
        try:
            yield _verify_file(dataset, source, file, checksums), True
        except (ValueError, OSError) as error:
            # The first wrong file may be what is wrong with the dataset as a whole.
            if (str(error), False) != overall:
                yield str(error), False
    # The names of parsed folders, intact or not, end in a fingerprint.
    pattern = re.compile(rf"{re.escape(dataset.name)}-[0-9a-f]{{12}}")
    for cache in cache_folders(dataset.home_folder):
        for folder in sorted(path for path in cache.glob("*") if pattern.fullmatch(path.name)):
            try:
                read_parsed(folder)
                yield f"{folder} is right", True
            except (ValueError, OSError) as error:
                yield str(error), False


def _verify_file(dataset: StoredDataset, source: Source, file: File, checksums: dict[str, str] | None) -> str:
    check_file(file)
    if file.checksum:
        return f"{file.path} is right"
    if checksums is None:
        dataset.check_content(source, file.path)
    actual = file_digest(file.path)
    if checksums is not None and checksums.get(file.path.name) != actual:
        remedy = "fetch it again, or delete the parsed folder"
        raise ValueError(f"{file.path} is not what was parsed: its {actual}; {remedy}")
    return f"{file.path} has no published checksum; its {actual}"


def _download_source(dataset: StoredDataset, source: Source) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        bar = bars.add_task(source.name, total=None)
        download_file(
            source,
            dataset.home_folder,
            lambda received, total: bars.update(bar, completed=received, total=total),
            partial(dataset.check_download, source),
        )


def _stored_datasets(names: list[str] | None, folder: str) -> list[StoredDataset]:
    path = resolve_folder(folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"folder is {path}, which is a file: name a folder")
    stored = {name: kind for name, kind in find_datasets().items() if issubclass(kind, StoredDataset)}
    return [lookup("dataset with files", name, stored)(folder=folder) for name in names or stored]


def _default_dataset(kind: type[Dataset], folder: str) -> Dataset:
    required = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
    if required:
        needs = f"{kind.name} has no counts of its own: it needs {', '.join(required)}"
        raise ValueError(f"{needs}; use `fedauc run --data {kind.name} --data.{required[0]} ...`")
    return kind(folder=folder) if issubclass(kind, StoredDataset) else kind()
