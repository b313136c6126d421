"""A configuration as a flat table of parameters, for tools that compare runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from fedauc.fields import list_fields


def flatten_parameters(value: Any, path: str = "") -> dict[str, Any]:
    """Every field by its path, such as `recipe.learning_rate`; members are named by their names.

    >>> from fedauc.participation.cyclic import Cyclic
    >>> parameters = flatten_parameters({"participation": Cyclic(groups=4)})
    >>> parameters["participation"], parameters["participation.groups"], parameters["participation.given"]
    ('cyclic', 4, '')
    """
    if is_dataclass(value) and not isinstance(value, type):
        name = getattr(type(value), "name", None)
        fields = {known.name: getattr(value, known.name) for known in list_fields(type(value))}
        return ({path: name} if path and isinstance(name, str) else {}) | flatten_parameters(fields, path)
    if isinstance(value, Mapping):
        prefix = f"{path}." if path else ""
        return {
            key: item for name, part in value.items() for key, item in flatten_parameters(part, prefix + name).items()
        }
    if isinstance(value, (tuple, list)) and any(map(is_dataclass, value)):
        named = {str(getattr(item, "name", index)): item for index, item in enumerate(value)}
        return {path: ",".join(named)} | flatten_parameters(named, path)
    if isinstance(value, (tuple, list)):
        return {path: ",".join(map(str, value))}
    return {path: value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)}
