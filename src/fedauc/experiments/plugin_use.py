"""Which plug-ins a configuration uses: written beside it, and imported before it is read again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from fedauc import plugins
from fedauc.discovery import UnknownName
from fedauc.metrics import DEFAULT_METRICS, parse_metrics

KEY = "plugins"
"""The key of a configuration's JSON; it is absent where every member belongs to the library."""


def list_used_plugins(config: Any) -> dict[str, dict[str, str | None]]:
    """`{"plugins": {module: package}}`, where a module that belongs to no installed package has None; or nothing."""
    packages = {module: plugins.package_of(module) for module in _used_modules(config)}
    named = {module: package and package.rpartition(" ")[0] for module, package in packages.items()}
    return {KEY: named} if named else {}


def describe_used_plugins(config: Any) -> dict[str, dict[str, str | None]]:
    """The same for environment.json, with the versions of the packages."""
    versions = {module: plugins.package_of(module) for module in _used_modules(config)}
    return {KEY: versions} if versions else {}


@contextmanager
def import_used_plugins(data: dict[str, Any], where: str) -> Iterator[None]:
    """Take the plug-ins out of a configuration's JSON and import them, then read the rest inside the `with` block.

    A module that cannot be imported matters only if its members are unknown: they may be registered from elsewhere.
    """
    used: Any = data.pop(KEY, {})
    if not isinstance(used, dict):
        raise ValueError(f"{where}.{KEY} is {used!r}; it must be an object with modules and their packages")
    problem = ""
    for module, package in used.items():
        try:
            if module == "__main__":
                remedy = f"move them to a module of their own, and name it in {plugins.VARIABLE} or with --plugin"
                raise ValueError(f"a script or notebook defined its own members; {remedy}")
            plugins.import_plugin(module)
        except ValueError as error:
            source = f"; it belonged to the package {package}" if package else ""
            problem = problem or f"{error}{source}"
    try:
        yield
    except UnknownName as error:
        if not problem:
            raise
        unknown = str(error).partition(":")[0]
        raise ValueError(f"{where} has an {unknown}, because {problem}") from error


def _used_modules(config: Any) -> list[str]:
    """The modules of the registered members and methods that a configuration names."""
    modules: dict[str, None] = {}
    method = getattr(getattr(config, "recipe", None), "method", "")
    metrics = parse_metrics(getattr(config, "metrics", DEFAULT_METRICS))
    for module in (plugins.plugin_of_method(method), *_modules_of_members(config), *_modules_of_members(metrics)):
        if module:
            modules[module] = None
    return list(modules)


def _modules_of_members(value: Any) -> Iterator[str]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _modules_of_members(item)
    elif is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        if isinstance(getattr(kind, "name", None), str):
            module = plugins.plugin_of_class(kind)
            if module is None:
                owner = plugins.describe_owner(kind)
                raise ValueError(f"{owner} is not registered, so no other process could find it; call fedauc.register")
            yield module
        for field in fields(value):
            yield from _modules_of_members(getattr(value, field.name))
