"""What a site keeps between messages, each of which is a process of its own."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np

from fedauc.experiments.checkpoint import write_atomically
from fedauc.federation.serialization import Payload

MAGIC = b"fedauc-site-1 "


class SiteState(Protocol):
    """Parcels by name."""

    def list_names(self) -> list[str]:
        """What is there."""

    def load_payload(self, name: str) -> Payload | None:
        """A parcel, if it is there."""

    def save_payload(self, name: str, parcel: Payload) -> None:
        """Put a parcel in, in place of one of that name."""

    def delete_payload(self, name: str) -> None:
        """Throw a parcel away."""


class FolderSiteState:
    """A folder of the site's own: it outlives processes, restarts and runs of the message service."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def list_names(self) -> list[str]:
        """What is there."""
        return sorted(path.stem for path in self._folder.glob("*.parcel"))

    def load_payload(self, name: str) -> Payload | None:
        """A parcel, if it is there and whole."""
        path = self._path(name)
        if not path.is_file():
            return None
        header, _, rest = path.read_bytes().partition(b"\n")
        if header != MAGIC + hashlib.sha256(rest).hexdigest().encode():
            raise ValueError(f"{path} is damaged: its {len(rest)} bytes do not match its checksum; delete it")
        text, _, body = rest.partition(b"\n")
        return Payload(text.decode(), np.frombuffer(body, np.uint8))

    def save_payload(self, name: str, parcel: Payload) -> None:
        """Put a parcel in, whole or not at all."""
        # JSON as we write it holds no line break, so the first one ends the facts.
        rest = parcel.header_text.encode() + b"\n" + parcel.body.tobytes()
        write_atomically(self._path(name), MAGIC + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)

    def delete_payload(self, name: str) -> None:
        """Throw a parcel away."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.parcel"
