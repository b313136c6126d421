"""The commands that vouch for a run folder: sign and verify."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from fedauc.cli.lazy_import import finish_imports

FinishedFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="The folder of a finished run.", show_default=False)
]


def sign(
    folder: FinishedFolder,
    key: Annotated[Path, typer.Option("--key", help="A PEM file with an Ed25519 private key.", show_default=False)],
    create_key: Annotated[
        bool, typer.Option("--create-key", help="Make that key first, and beside it the public key as .pub.")
    ] = False,
) -> None:
    """Sign the hashes of all files of a finished run, so that others can verify who wrote them.

    Example: [bold]fedauc sign runs/first --key signing.pem --create-key[/bold]
    """
    finish_imports()

    from fedauc.experiments.folder import RunFolder
    from fedauc.experiments.manifest import create_signing_key, sign_folder

    if not RunFolder(folder).done:
        raise ValueError(f"{folder} is no finished run: it has no result.json; sign it when it is done")
    if create_key:
        create_signing_key(key)
    print(f"{folder} is signed by the key {sign_folder(folder, key)}")


def verify(
    folder: FinishedFolder,
    public_key: Annotated[
        Path | None, typer.Option("--public-key", help="A PEM file with the public key that must have signed.")
    ] = None,
) -> None:
    """Check the hashes and the signature of a run, and compute its result again from its records and its model.

    Exit code 1 says that something is wrong; what could not be checked is listed, and is no error.

    Example: [bold]fedauc verify runs/first --public-key signing.pem.pub[/bold]
    """
    finish_imports()

    from fedauc.experiments.verification import verify_folder

    findings = verify_folder(folder, public_key)
    for finding in findings:
        print(f"{finding.verdict:12}{finding.text}")
    wrong = sum(finding.verdict == "wrong" for finding in findings)
    failed = f"{wrong} check{'s' * (wrong > 1)} failed"
    print(f"{folder}: {failed if wrong else 'every check that could be made has passed'}")
    if wrong:
        raise typer.Exit(1)


COMMANDS: dict[str, Callable[..., None]] = {"sign": sign, "verify": verify}
"""The commands of this module, in the order in which help lists them."""
