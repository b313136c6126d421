"""How Sphinx builds the documentation from the Markdown pages of this folder: `make docs`."""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from typing import Any

import fedauc
from fedauc.fields import list_fields

project, author = "fedauc", "The fedauc authors"
release = version = fedauc.__version__
project_copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build", "figures"]
html_theme, html_title = "furo", "fedauc"
html_show_sphinx = False

# Anchors such as results.md#what-has-not-been-run, as GitHub makes them.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# Docstrings are plain text with code in single backquotes.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 100

# `make docs` checks links inside the site and lists the others; `make docs-links` fetches them.
linkcheck_timeout = 20
linkcheck_anchors = False


def describe_fields(value: Any) -> list[str]:
    """The help texts of a configuration's fields, which have no docstrings, as a list."""
    fields = list_fields(value) if is_dataclass(value) and isinstance(value, type) else ()
    described = [(known.name, known.description.help) for known in fields if known.description.help]
    return [line for name, text in described for line in (f"`{name}`", f"    {text}")]


def convert_docstring(app: Any, kind: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Plain docstrings to reStructuredText: code that is indented after a colon, and lists such as `name : meaning`."""
    converted = []
    for number, line in enumerate(lines):
        following = lines[number + 1 : number + 3]
        starts_code = len(following) == 2 and not following[0].strip() and following[1].startswith("    ")
        if starts_code and line.endswith(":") and not line.startswith(" "):
            converted.append(line + ":")
        elif parameter := re.match(r"(\w+) : (.+)", line):
            converted += [f"`{parameter[1]}`", f"    {parameter[2]}"]
        else:
            converted.append(line)
    lines[:] = [*converted, "", *describe_fields(value)] if kind == "class" else converted


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", convert_docstring)
