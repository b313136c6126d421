"""Delay the code of a package until it is needed: importing torch takes seconds, checking an option does not.

(`importlib.util.LazyLoader` runs the code at the second `import` statement, which asks for `__spec__`.)
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any


class DelayedModule(ModuleType):
    """A package whose code runs when it is asked for an attribute that an empty module does not have."""

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":
            # Its own code may import that submodule too, which would then run twice.
            raise AttributeError(f"call finish_import({self.__name__!r}) before importing a submodule")
        finish_import(self.__name__)
        return getattr(self, name)


def delay_import(name: str) -> None:
    """Let `import NAME` return at once, and run the package's code when it is first used."""
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is not None:
        module = importlib.util.module_from_spec(spec)
        del module.__path__
        module.__class__ = DelayedModule
        sys.modules[name] = module


def finish_import(name: str) -> None:
    """Run the code of a package now, if it is delayed; its submodules can be imported from here on."""
    module = sys.modules.get(name)
    if isinstance(module, DelayedModule):
        spec = module.__spec__
        assert spec is not None
        assert spec.loader is not None
        # An ordinary module, also for the imports that its own code makes.
        module.__class__ = ModuleType  # type: ignore[assignment]
        module.__path__ = spec.submodule_search_locations or []
        spec.loader.exec_module(module)


def finish_imports() -> None:
    """Run the code of every delayed package, numpy's before torch's, which imports parts of numpy.

    What trains is imported too, since that loads torch's compiler: after this, Ctrl-C finds nothing half imported.
    """
    with exiting_on_interrupt():
        for name in ("numpy", "torch"):
            finish_import(name)
        importlib.import_module("fedauc.experiments.runner")


@contextmanager
def exiting_on_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process at once, without exit handlers: inside torch's own imports it is a long traceback."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        yield
        return
    previous = signal.signal(signal.SIGINT, _exit_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted before the first round; nothing was saved\n")
    os._exit(130)
