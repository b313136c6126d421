"""Caveats: results on synthetic data, or on data that replaces the paper's, say so first."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fedauc.experiments.folder import RunFolder

MARKS = ("STAND-IN", "SYNTHETIC")
"""How the note of a dataset begins that must not be taken for the real one."""


def has_caveat(note: str) -> bool:
    """Whether a note says that the data is synthetic or replaces other data."""
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
    """A line for each dataset with a caveat; none where all data is what it is called.

    The line is the note of the runs, without its counts where these differ. If the runs use several datasets, the line
    names its own.
    """
    noted = [folder for _, folder in folders if folder.note]
    names = {folder.config.data.name for folder in noted}
    by_source: dict[str, list[RunFolder]] = {}
    for folder in noted:
        if has_caveat(folder.note):
            by_source.setdefault(source_of(folder.note), []).append(folder)
    lines = []
    for source, sharing in by_source.items():
        line = sharing[0].note if len({folder.note for folder in sharing}) == 1 else source
        lines.append(f"{line} (data {sharing[0].config.data.name})" if len(names) > 1 else line)
    return lines


def caveat_sentence(name: str, note: str, positives: int | None = None) -> str:
    """A sentence that says that a dataset is not the paper's.

    >>> caveat_sentence("x", "STAND-IN for others, rows; and more", 7)
    "`x` is not the paper's data: STAND-IN for others, rows, 7 positives to test on."
    """
    tested = "" if positives is None else f", {positives} positives to test on"
    return f"`{name}` is not the paper's data: {source_of(note)}{tested}."
