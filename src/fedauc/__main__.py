"""`python -m fedauc` and the `fedauc` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Start the command line, or say what it needs."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        print(f"error: the command line needs {error.name}; install it: pip install 'fedauc[cli]'", file=sys.stderr)
        sys.exit(2)
    from fedauc.cli import start

    start()


if __name__ == "__main__":
    main()
