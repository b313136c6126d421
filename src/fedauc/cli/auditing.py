"""The command `fedauc audit`: what a run reveals, measured, beside what is proven."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from fedauc.cli.lazy_import import finish_imports

RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.", show_default=False)]


def audit(
    folder: RunFolder,
    canaries: Annotated[
        int | None,
        typer.Option("--canaries", min=4, help="Canaries of a repetition; 200, or one per parameter of a small model."),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option("--repeats", min=1, help="Repetitions of the training; by default up to 10, for 200 canaries."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the canaries and of the noise.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what a run reveals: the epsilon that canary clients find, and what its score pool tells about rows.

    The training is repeated in memory with other noise. Exit code 1 says that the run reveals more than is proven.

    Private runs: made-up clients take part or not, and guessing which gives a lower limit of epsilon.

    Pairwise methods: rows are looked up in the raw score pool and in the histogram pool.

    The result is also written to audit.json in the folder.

    Example: [bold]fedauc audit runs/private --repeats 10[/bold]
    """
    finish_imports()

    from fedauc.experiments.auditing import audit_run
    from fedauc.experiments.comparison import Comparison
    from fedauc.experiments.folder import RunFolder
    from fedauc.experiments.tuning import Tuning
    from fedauc.federation.server import AGREEMENT_FILE
    from fedauc.reports.audits import print_audit
    from fedauc.reports.progress import open_progress

    if (folder / AGREEMENT_FILE).is_file():
        raise ValueError(
            f"{folder} is the folder of a federated run, whose rows are at its sites; audit a `fedauc run` of the same "
            "configuration instead"
        )
    if Comparison.is_comparison(folder) or Tuning.is_tuning(folder):
        raise ValueError(f"{folder} holds several runs; audit one of their folders")
    with open_progress() as bars:
        result = audit_run(folder, canaries, repeats, seed, bars.add_bar)
    if not RunFolder(folder).done:
        print(f"note: {folder} is not finished; the whole run was audited, as it is configured", file=sys.stderr)
    if as_json:
        print(json.dumps(result.to_document(), indent=2))
    else:
        print_audit(result)
    if result.is_violated:
        raise typer.Exit(1)


COMMANDS: dict[str, Callable[..., None]] = {"audit": audit}
"""The commands of this module."""
