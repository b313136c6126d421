"""Help in a narrow terminal: names of options are never cut, and the help text is folded beside them."""

from __future__ import annotations

from typing import Any


def keep_option_names() -> None:
    """Let typer print tables of options whose last column alone, the help text, gives way."""
    import typer.rich_utils
    from rich.table import Table

    class OptionTable(Table):
        """A table of which only the last column is folded."""

        def add_row(self, *cells: Any, **settings: Any) -> None:
            super().add_row(*cells, **settings)
            for column in self.columns[:-1]:
                column.no_wrap = True

    vars(typer.rich_utils)["Table"] = OptionTable
