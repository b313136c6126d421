"""Members that live outside the library: where they come from, and what is known of them.

A plug-in is a module. Those of its classes that derive from a base class of the library and have a `name` are members,
and its `METHODS` are methods, as in the library's own folders. There are three ways in:

- an entry point of an installed package, in the group `fedauc.plugins`, whose value names the module;
- the environment variable `FEDAUC_PLUGINS`, or `fedauc --plugin MODULE`: modules that Python or the current folder has;
- `fedauc.register(...)` in Python, for a class, a method or a module.

Modules of the first two kinds are imported when members are looked up for the first time, so that commands which look
up nothing stay fast.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

GROUP = "fedauc.plugins"
"""The group of entry points that packages use."""

VARIABLE = "FEDAUC_PLUGINS"
"""The environment variable that names modules, separated by commas."""

LIBRARY = __name__.partition(".")[0]


class Registered(NamedTuple):
    """A class or a method from outside the library, and the module whose import registers it."""

    item: Any
    module: str


class Registry:
    """What this process has registered so far."""

    def __init__(self) -> None:
        self.classes: dict[str, Registered] = {}
        """By module and class name, so that a class that is defined again, as in a notebook, replaces its old self."""
        self.methods: dict[str, Registered] = {}
        self.packages: dict[str, str] = {}
        """The installed package and version of a module that came through an entry point."""
        self.seen: set[str] = set()
        """Modules whose import was tried, and `GROUP` once the entry points were read."""
        self.caches: list[Callable[[], None]] = []

    def clear_caches(self) -> None:
        """Forget what was computed from the members that were known before."""
        for clear in self.caches:
            clear()


_REGISTRY = Registry()


def cache_until_registration(function: Callable[P, T]) -> Callable[P, T]:
    """`functools.cache` for what depends on the known members: a registration empties it."""
    cached: Any = functools.cache(function)
    _REGISTRY.caches.append(cached.cache_clear)
    result: Callable[P, T] = cached
    return result


def save_registrations() -> dict[str, Any]:
    """What is registered now, for `load_registrations`."""
    return {name: value.copy() for name, value in vars(_REGISTRY).items() if name != "caches"}


def load_registrations(saved: dict[str, Any]) -> None:
    """Go back to what was registered when `save_registrations` was called."""
    vars(_REGISTRY).update(saved)
    _REGISTRY.clear_caches()


@contextmanager
def restore_registrations() -> Iterator[None]:
    """Undo every registration that is made inside the `with` block, for tests."""
    saved = save_registrations()
    try:
        yield
    finally:
        load_registrations(saved)


# ------------------------------------------------------------------------------------------------------- registering


def add_class(member: type, module: str = "") -> None:
    """Register one class; one that cannot be a member is refused with what it lacks."""
    check_member(member)
    _REGISTRY.classes[describe_owner(member)] = Registered(member, module or member.__module__)
    _REGISTRY.clear_caches()


def add_method(method: Any, module: str = "") -> None:
    """Register one method; another method of that name, of another module, is refused."""
    owner = module or method.algorithm.__module__
    check_name(f"a method of {owner}", method.name)
    registered = _REGISTRY.methods.get(method.name)
    if registered is not None and registered.module != owner:
        raise ValueError(name_clash("method", method.name, registered.module, owner))
    _REGISTRY.methods[method.name] = Registered(method, owner)
    _REGISTRY.clear_caches()


def add_module(module: ModuleType) -> None:
    """Register the members and methods of a module, and those that its submodules define and it imports."""
    name = module.__name__
    local = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and (value.__module__ == name or value.__module__.startswith(f"{name}."))
    ]
    bases = {base for value in local for base in value.__mro__[1:]}
    members = [value for value in local if find_base(value) and not _is_base_class(value, bases)]
    methods = getattr(module, "METHODS", ())
    if not members and not methods:
        needed = "a class with a name that derives from a base class of fedauc, or METHODS"
        raise ValueError(f"the plug-in {name!r} has no member: it needs {needed}")
    is_list = isinstance(methods, (tuple, list))
    if not is_list or not all(hasattr(method, "algorithm") and hasattr(method, "name") for method in methods):
        needs = "it must be a tuple of Methods: write METHODS = (Method(...),)"
        raise ValueError(f"METHODS of the plug-in {name!r} is a {type(methods).__name__}; {needs}")
    for member in members:
        add_class(member, name)
    for method in methods:
        add_method(method, name)


def check_member(member: type) -> None:
    """Refuse a class that no configuration could name."""
    owner = describe_owner(member)
    if find_base(member) is None:
        bases = "such as fedauc.interfaces.Objective"
        raise ValueError(f"{owner} derives from no base class of fedauc that has members; derive it from one, {bases}")
    if missing := sorted(getattr(member, "__abstractmethods__", ())):
        raise ValueError(f"{owner} lacks {', '.join(missing)}; define it there, so that the class is complete")
    if not isinstance(vars(member).get("name"), str):
        raise ValueError(f'{owner} has no name of its own; add name: ClassVar[str] = "..." to the class')
    check_name(owner, vars(member)["name"])


def check_name(owner: str, name: str) -> None:
    """Refuse a name that no option can hold: options separate names by commas, and put dots and signs behind them."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise ValueError(
            f"{owner} has the name {name!r}; a name consists of letters a-z, digits, '-' and '_': rename it"
        )


def find_base(member: type) -> type | None:
    """The library's base class of a member's kind: the one that declares `name`, such as Objective."""
    for base in reversed(member.__mro__[1:]):
        if base.__module__.partition(".")[0] == LIBRARY and "name" in inspect.get_annotations(base):
            return base
    return None


def describe_owner(member: type) -> str:
    """The full name of a class."""
    return f"{member.__module__}.{member.__qualname__}"


def name_clash(kind: str, name: str, first: str, second: str) -> str:
    """The error for two members of one name."""
    return f"{kind} name {name!r} is used by {first} and by {second}; give one of them another name"


def _is_base_class(value: type, bases: set[type]) -> bool:
    """Whether a class is there for others to derive from: it has no name, and is abstract, hidden or derived from."""
    if "name" in vars(value):
        return False
    return inspect.isabstract(value) or value in bases or value.__name__.startswith("_")


# ----------------------------------------------------------------------------------------------------------- importing


def import_plugin(name: str) -> None:
    """Import a module, from the current folder as well, and register its members; a failure is a one-line error."""
    if name in _REGISTRY.seen:
        return
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    _REGISTRY.seen.add(name)
    try:
        add_module(_import_module(name))
    except ValueError:
        _REGISTRY.seen.discard(name)
        raise


def load_plugins() -> None:
    """Import the modules of `FEDAUC_PLUGINS` and of entry points that were not imported yet.

    A module that was asked for must work. A package that is only installed may be broken: one line says so, and the
    library goes on without it.
    """
    for name in filter(None, map(str.strip, os.environ.get(VARIABLE, "").split(","))):
        import_plugin(name)
    if GROUP in _REGISTRY.seen:
        return
    _REGISTRY.seen.add(GROUP)
    for entry in entry_points(group=GROUP):
        try:
            _load_entry_point(entry)
        except ValueError as error:
            logging.getLogger(LIBRARY).warning("%s; fedauc goes on without it", error)


def _load_entry_point(entry: EntryPoint) -> None:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.name
    if entry.value in _REGISTRY.seen:
        return
    _REGISTRY.seen.add(entry.value)
    try:
        if entry.attr:
            raise ValueError(f"its entry point is {entry.value!r}; it must name a module, such as {entry.module!r}")
        add_module(_import_module(entry.value))
    except ValueError as error:
        raise ValueError(f"the installed package {package} cannot be used: {error}") from error
    _REGISTRY.packages[entry.value] = package


def _import_module(name: str) -> ModuleType:
    if name.endswith(".py") or "/" in name or os.sep in name:
        module = Path(name).name.removesuffix(".py")
        raise ValueError(f"the plug-in {name!r} is a file; name its module: write {module}, and run in its folder")
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            remedy = "install the package that has it, add its folder to PYTHONPATH, or run in its folder"
            raise ValueError(f"there is no plug-in module {name!r} here; {remedy}") from error
        raise ValueError(f"the plug-in {name!r} cannot be imported: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """An error in one line: its kind, its message, and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError):
        # Its message names the place in the file already; the frame is that of Python's importer.
        return reason
    return f"{reason} ({Path(frame.filename).name}, line {frame.lineno})"


# ----------------------------------------------------------------------------------------------------- what is known


def registered_classes(base: type[T]) -> list[type[T]]:
    """The registered subclasses of a base class."""
    load_plugins()
    return [registered.item for registered in _REGISTRY.classes.values() if issubclass(registered.item, base)]


def registered_methods() -> list[Registered]:
    """The registered methods, each with its module."""
    load_plugins()
    return list(_REGISTRY.methods.values())


def plugin_of_class(member: type) -> str | None:
    """The module whose import registers a class: empty for the library's own, None where it is not registered."""
    if member.__module__.partition(".")[0] == LIBRARY:
        return ""
    registered = _REGISTRY.classes.get(describe_owner(member))
    return registered.module if registered is not None and registered.item is member else None


def plugin_of_method(name: str) -> str:
    """The module whose import registers a method; empty for the library's own and for unknown ones."""
    registered = _REGISTRY.methods.get(name)
    return registered.module if registered is not None else ""


def package_of(module: str) -> str | None:
    """The name and version of the installed package that a plug-in came from, if it came from one."""
    return _REGISTRY.packages.get(module)
