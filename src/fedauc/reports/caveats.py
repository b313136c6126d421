"""How results say that their rows only stand in for others."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fedauc.experiments.folder import RunFolder

MARKS = ("STAND-IN", "SYNTHETIC")
"""How the note of rows begins that nobody may take for the real ones."""


def has_caveat(note: str) -> bool:
    """Whether the rows only stand in for others."""
    return note.startswith(MARKS)


def source_of(note: str) -> str:
    """What was loaded, without what a run made of it."""
    return note.split(";")[0]


def shorten_note(note: str) -> str:
    """The words up to the first `;` or `,` that is not inside a number, for a title.

    >>> shorten_note("STAND-IN for photographs: 1,500 drawings, in ink; 9 of 9 rows")
    'STAND-IN for photographs: 1,500 drawings'
    """
    return re.split(r"[;,](?!\d)", note, maxsplit=1)[0]


def list_caveats(folders: Iterable[tuple[str, RunFolder]]) -> list[str]:
    """A line for each kind of rows that only stand in; none where all rows are what they are called.

    It is the note of the runs, or the kind alone where their counts differ. Beside another dataset it says whose it is.
    """
    known = [folder for _, folder in folders if folder.note]
    owners: dict[str, list[RunFolder]] = {}
    for folder in known:
        if has_caveat(folder.note):
            owners.setdefault(source_of(folder.note), []).append(folder)
    mixed = len({folder.config.data.name for folder in known}) > 1
    return [_label(what, mine, mixed) for what, mine in owners.items()]


def _label(what: str, folders: list[RunFolder], mixed: bool) -> str:
    notes = {folder.note for folder in folders}
    text = notes.pop() if len(notes) == 1 else what
    return f"{text} (data {folders[0].config.data.name})" if mixed else text


def caveat_sentence(name: str, note: str, positives: int | None = None) -> str:
    """That rows only stand in for the paper's, as on the page of results.

    >>> caveat_sentence("x", "STAND-IN for others, rows; and more", 7)
    "`x` is not the paper's data: STAND-IN for others, rows, 7 positives to test on."
    """
    tested = "" if positives is None else f", {positives} positives to test on"
    return f"`{name}` is not the paper's data: {source_of(note)}{tested}."
