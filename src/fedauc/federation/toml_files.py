"""Reading the TOML files of a federation, with errors of one line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def read_toml_file(path: Path, name: str, remedy: str) -> dict[str, Any]:
    """The content of a file; `name` is the setting that names it, and `remedy` what to do if there is none."""
    if not path.is_file():
        raise ValueError(f"{name} is {str(path)!r}; no such file: {remedy}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML ({error}); correct it") from error
