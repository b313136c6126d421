"""Privacy as numbers: accounting, noise, noised statistics and audits. The mechanisms are upload transforms."""

from __future__ import annotations

import importlib
from types import ModuleType


def import_privacy_package(name: str) -> ModuleType:
    """A module of an optional package, imported when it is first needed: the core needs torch and numpy only.

    >>> import_privacy_package("no_such_package.module")
    Traceback (most recent call last):
    ...
    ValueError: privacy needs no-such-package, which is not installed: run pip install no-such-package
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = (error.name or name).partition(".")[0].replace("_", "-")
        raise ValueError(f"privacy needs {package}, which is not installed: run pip install {package}") from None
