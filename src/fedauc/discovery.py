"""Find the members of a folder: a new loss, schedule, algorithm or dataset is one new file, not an entry in a list.

Members that live outside the library are added to them (see `plugins.py`).
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from fedauc.plugins import describe_owner, name_clash, registered_classes

T = TypeVar("T")


def import_modules(package: str) -> list[ModuleType]:
    """Import every public module of a package and of the packages inside it, in alphabetical order.

    A module that is no package is returned alone.
    """
    home = importlib.import_module(package)
    if not hasattr(home, "__path__"):
        return [home]
    names = sorted(info.name for info in pkgutil.walk_packages(home.__path__, f"{package}."))
    return [importlib.import_module(name) for name in names if not name.rpartition(".")[2].startswith("_")]


def find_members(package: str, base: type[T]) -> dict[str, type[T]]:
    """The concrete subclasses of `base` that a package's modules define or that are registered, by their `name`.

    They come in alphabetical order.
    """
    members: dict[str, type[T]] = {}
    for module in import_modules(package):
        for value in vars(module).values():
            is_local = inspect.isclass(value) and value.__module__ == module.__name__
            if is_local and issubclass(value, base) and hasattr(value, "name"):
                name, new = vars(value).get("name", ""), value.__qualname__
                if inspect.isabstract(value):
                    check_complete(value)
                    continue
                if name in members:
                    raise ValueError(f"name {name!r} is taken by {members[name].__qualname__}; give {new} another")
                members[value.name] = value
    for member in registered_classes(base):
        name = vars(member)["name"]
        if members.setdefault(name, member) is not member:
            raise ValueError(name_clash(base.__name__, name, describe_owner(members[name]), describe_owner(member)))
    return dict(sorted(members.items()))


def read_declared_members(package: str, base: str) -> dict[str, str]:
    """What `find_members` would find, from the source code alone: each name, with the first line of its docstring.

    Engines import torch and its compiler, which takes seconds; help and lists need no more than their names.

    >>> sorted(read_declared_members("fedauc.participation", "Participation"))
    ['cyclic', 'cyclic-poisson', 'full', 'trace', 'uniform']
    """
    home = importlib.util.find_spec(package)
    classes: dict[str, ast.ClassDef] = {}
    for folder in home.submodule_search_locations or () if home else ():
        texts = [file.read_text(encoding="utf-8") for file in sorted(Path(folder).rglob("[!_]*.py"))]
        # Parsing takes 10 ms for a thousand lines, so a file without a declared name is not parsed.
        nodes = [node for text in texts if "name: ClassVar" in text for node in ast.parse(text).body]
        classes |= {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}

    def is_descendant(node: ast.ClassDef) -> bool:
        parents = [ast.unparse(parent) for parent in node.bases]
        return base in parents or any(is_descendant(classes[parent]) for parent in parents if parent in classes)

    members = {}
    for node in filter(is_descendant, classes.values()):
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == "name" and line.value is not None:
                members[str(ast.literal_eval(line.value))] = (ast.get_docstring(node) or "").split("\n")[0]
    return dict(sorted(members.items()))


def check_complete(member: type) -> None:
    """Refuse a class that has a `name` of its own but lacks methods; base classes have no name, and may lack some.

    >>> from fedauc.interfaces import Participation
    >>> check_complete(type("Weekly", (Participation,), {"name": "weekly"}))
    Traceback (most recent call last):
    ...
    ValueError: Weekly (named 'weekly') lacks the method bind; define it, or drop its name if it is a base class
    """
    missing, name = sorted(getattr(member, "__abstractmethods__", ())), vars(member).get("name")
    if missing and isinstance(name, str):
        methods = f"the method{'s' * (len(missing) > 1)} {', '.join(missing)}"
        remedy = f"define {'them' if len(missing) > 1 else 'it'}, or drop its name if it is a base class"
        raise ValueError(f"{member.__qualname__} (named {name!r}) lacks {methods}; {remedy}")


class UnknownName(ValueError):
    """A name that nothing has."""


def lookup(kind: str, name: str, known: Mapping[str, T], listed: int = 40, source: str = "") -> T:
    """The member called `name`, or a one-line error with the nearest match, which lists up to so many names.

    Where there are more, the error says their number, and `source` is what lists them.

    >>> lookup("method", "cycp-minmax", {"cycp-minimax": 1})
    Traceback (most recent call last):
    ...
    fedauc.discovery.UnknownName: unknown method 'cycp-minmax': did you mean 'cycp-minimax'? known: cycp-minimax
    """
    # A name from a file may be a list or an object, which no dictionary can look up.
    if isinstance(name, Hashable) and name in known:
        return known[name]
    lower_case = {str(member).lower(): member for member in known}
    abbreviated = [member for member in lower_case if _abbreviate(member) == str(name).lower()]
    near = abbreviated or difflib.get_close_matches(str(name).lower(), list(lower_case), n=1, cutoff=0.4)
    suggestion = f"did you mean {lower_case[near[0]]!r}? " if near else ""
    # A list of a hundred options helps nobody.
    many = f"{len(known)} names{f', see {source}' if source else ''}"
    names = ", ".join(sorted(map(str, known))) if len(known) <= listed else many
    raise UnknownName(f"unknown {kind} {name!r}: {suggestion}known: {names}")


def _abbreviate(name: str) -> str:
    """The first letters of the words of a name.

    >>> _abbreviate("learning_rate"), _abbreviate("local-steps")
    ('lr', 'ls')
    """
    return "".join(word[0] for word in re.split("[_.-]", name) if word)


def refuse_class(name: str, value: Any) -> None:
    """Refuse a class, or a list that holds one, where instances belong.

    >>> refuse_class("objective", [UnknownName])
    Traceback (most recent call last):
    ...
    ValueError: objective: UnknownName is a class; write UnknownName()
    """
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, type):
            raise ValueError(f"{name}: {item.__name__} is a class; write {item.__name__}()")


def read_members(name: str, given: Any, base: type[T], read: Callable[[str], T]) -> tuple[T, ...]:
    """Members from a text with commas, from one member, or from several members and texts, which `read` understands."""
    items = given.split(",") if isinstance(given, str) else given if isinstance(given, Iterable) else (given,)
    members = tuple(read(item.strip()) if isinstance(item, str) else item for item in items)
    refuse_class(name, members)
    for member in members:
        if not isinstance(member, base):
            shown, needs = " ".join(repr(member).split()), f"it must hold names or {base.__name__}s"
            raise ValueError(f"{name} holds {shown}; {needs}: see `fedauc list {name}`")
    return members
