"""What a configuration can name, as tables."""

from __future__ import annotations

from rich.table import Table

from fedauc.algorithms import find_methods
from fedauc.experiments.config import list_families
from fedauc.experiments.options import format_default, list_parameters


def methods_table() -> Table:
    """Every method, with what it is made of."""
    table = _table("method", "algorithm", "participation", "step", "reference")
    for method in find_methods().values():
        row = (method.algorithm.name, method.participation, f"{method.learning_rate:g}", method.reference)
        table.add_row(method.name, *row)
    return table


def members_table(kind: str) -> Table:
    """Every member of a family, with its parameters and their defaults."""
    members = next(family.members for family in list_families() if family.kind == kind)
    table = _table("name", "parameters", "what")
    for name, member in members.items():
        made = ", ".join(f"{found.name}={format_default(found.default)}" for found in list_parameters(member))
        table.add_row(name, made or "-", (member.__doc__ or "").split("\n")[0])
    return table


def _table(*headers: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for header in headers:
        table.add_column(header, overflow="fold")
    return table
