"""Shell completion: which words are being completed, and the values that options accept.

`fedauc --install-completion` installs it for bash, zsh or fish. At every press of the tab key the shell starts fedauc
with the typed words in an environment variable, so that this must not import torch.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path

import typer

VARIABLE = "_FEDAUC_COMPLETE"
"""Set by the shell's completion script; its value names the shell."""


def is_completing() -> bool:
    """Whether a shell asks for completions."""
    return VARIABLE in os.environ


def read_typed_words() -> list[str]:
    """The words after `fedauc` that are on the user's command line, the last one perhaps not complete.

    bash gives them in one variable, zsh and fish in another. An open quote is taken as it is.
    """
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    try:
        return shlex.split(line)[1:]
    except ValueError:
        return line.split()[1:]


def complete_from(names: Iterable[str], several: bool = False) -> Callable[[str], list[str]]:
    """What completes the value of an option that takes one of these names, or several with commas between them.

    >>> complete_from(["clip", "quantize"], several=True)("clip,q")
    ['clip,quantize']
    """
    choices = list(names)

    def complete(incomplete: str) -> list[str]:
        earlier_names, comma, last = incomplete.rpartition(",") if several else ("", "", incomplete)
        return [f"{earlier_names}{comma}{name}" for name in choices if name.startswith(last)]

    return complete


def sketch_group(name: str) -> typer.Typer:
    """The commands of a group by their names, read from its source files: importing the group would import torch."""
    group, folder = typer.Typer(), Path(__file__).parent
    # Such as `app.add_typer(federation_nvflare.app, name="nvflare")`.
    nested = dict(re.findall(r"app\.add_typer\((\w+)\.app, name=\"(\w+)\"\)", (folder / f"{name}.py").read_text()))
    for module, label in nested.items():
        group.add_typer(sketch_group(module), name=label)
    files = [path for path in sorted(folder.glob(f"{name}*.py")) if path.stem not in nested]
    nodes = [node for path in files for node in ast.parse(path.read_text(encoding="utf-8")).body]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    for node in functions:
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "app.command":
                names = [word.value for word in decorator.args if isinstance(word, ast.Constant)]
                help_text = (ast.get_docstring(node) or "").split("\n")[0]
                group.command(str(names[0]) if names else node.name.replace("_", "-"), help=help_text)(lambda: None)
    return group
