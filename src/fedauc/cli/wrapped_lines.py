"""Lines of text that fit the terminal in which a command prints them."""

from __future__ import annotations

import shutil
import sys
import textwrap


def print_wrapped(line: str) -> None:
    """Print a line, in a terminal on as many lines as it needs; a file or another program gets it whole."""
    if sys.stdout.isatty():
        line = textwrap.fill(line, shutil.get_terminal_size().columns, subsequent_indent="  ")
    print(line)
