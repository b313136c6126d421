"""`python -m fedauc` and the `fedauc` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Start the command line, or say what it needs."""
    try:
        try:
            import rich  # noqa: F401
            import typer  # noqa: F401
        except ModuleNotFoundError as error:
            remedy = "run pip install typer rich matplotlib"
            print(f"error: the command line needs {error.name}, which is not installed: {remedy}", file=sys.stderr)
            sys.exit(2)
        from fedauc.cli import start

        start()
    except KeyboardInterrupt:
        print("interrupted before the first round; nothing was saved", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
