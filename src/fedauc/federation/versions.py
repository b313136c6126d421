"""Which versions work together: every message says its format and which fedauc wrote it, and each side checks that.

Only formats must be equal, so that versions of fedauc that differ in other things work together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedauc.version import VERSION

MESSAGE_FORMAT = 2
"""Version of the messages between server and sites. It is raised when a side of the version before could not read a
message, or could misunderstand it; format 1 is that of versions whose messages do not say their format.

The setting `validation-fraction` did not raise it: runs without it have the messages that they had, and in runs with it
a site that does not know the setting is refused because it does not confirm it (`find_setting_problem`).
"""

FLOWER_VERSIONS = ("1.41", "1.42")
"""The versions of Flower that the federation was tested with."""

FLOWER_REQUIREMENT = "flwr>=1.41,<1.43"

MAX_VERSION_LENGTH = 40
"""More characters of a version that the other side sent are not repeated."""


def stamp_version(header: Mapping[str, Any]) -> dict[str, Any]:
    """The header of a message with the format and the version of its sender."""
    return {**header, "message_format": MESSAGE_FORMAT, "fedauc": VERSION}


def find_setting_problem(header: Mapping[str, Any], validation_fraction: float) -> str:
    """Why a site must not take part in a run whose sites hold out validation rows; empty if it has confirmed them.

    >>> find_setting_problem({"kind": "register", "validation_fraction": 0.2}, 0.2)
    ''
    """
    if header.get("validation_fraction", 0.0) == validation_fraction:
        return ""
    confirmed = f"it does not confirm validation-fraction = {validation_fraction:g}"
    return f"{confirmed}, and would train on all of its rows: upgrade fedauc at the site"


def find_version_problem(header: Mapping[str, Any], sender: str, reader: str) -> str:
    """Why a message must not be read, in one line with both versions and the remedy; empty if its format is ours.

    >>> find_version_problem({"message_format": MESSAGE_FORMAT}, "the server", "this site")
    ''
    >>> find_version_problem({"kind": "visit"}, "the server", "this site").partition(";")[0]
    'the server runs an earlier fedauc (messages of format 1)'
    """
    sent = header.get("message_format", 1)
    if type(sent) is not int:
        sent = 1
    if sent == MESSAGE_FORMAT:
        return ""
    release = f"fedauc {str(header['fedauc'])[:MAX_VERSION_LENGTH]}" if "fedauc" in header else "an earlier fedauc"
    older = sender if sent < MESSAGE_FORMAT else reader
    ours = f"{reader} runs fedauc {VERSION} (format {MESSAGE_FORMAT})"
    return f"{sender} runs {release} (messages of format {sent}); {ours}: upgrade fedauc at {older}"
