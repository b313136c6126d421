"""Delay the code of a package until it is needed: importing torch takes seconds, checking an option does not.

(`importlib.util.LazyLoader` runs the code at the second `import` statement, which asks for `__spec__`.)
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
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
    """Run the code of every delayed package, numpy's before torch's, which imports parts of numpy."""
    for name in ("numpy", "torch"):
        finish_import(name)
