"""`python -m paper`: the paper's tables and figures."""

from __future__ import annotations

import sys

from fedauc.cli import run_app, take_plugins
from paper.commands import app


def main() -> None:
    """Start the command line."""
    run_app(lambda: app, take_plugins(sys.argv[1:]), "python -m paper", "go on with: the same command")


if __name__ == "__main__":
    main()
