"""`python -m paper`: the paper's tables and figures."""

from __future__ import annotations

from fedauc.cli import run_app
from paper.commands import app


def main() -> None:
    """Start the command line."""
    run_app(app, "python -m paper", "the same command")


if __name__ == "__main__":
    main()
