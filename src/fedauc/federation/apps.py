"""A Flower app that is ready to run: files from the template, certificates, keys, and the server's table."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from fedauc.experiments.checkpoint import write_atomically
from fedauc.federation.credentials import make_certificates, make_key

FILES = {
    "pyproject.toml": "pyproject.toml.template",
    "README.md": "README.md.template",
    "fedauc_app/__init__.py": "package.py.template",
    "fedauc_app/server_app.py": "server_app.py.template",
    "fedauc_app/client_app.py": "client_app.py.template",
    "fedauc_app/data.py": "data.py.template",
}
"""What an app consists of, and the file of the template it is made from."""

IGNORED = ("certificates/", "keys/", "sites.toml", "sites/", "run/", "flower/", "logs/", "__pycache__/")
"""What must never be published with the app."""


def make_app(folder: Path, groups: Mapping[str, str], hosts: Sequence[str] = ("localhost", "127.0.0.1")) -> None:
    """Write an app for these sites (name to group), whole or not at all."""
    if find_spec("flwr") is None:
        raise ValueError("flwr is not installed here; a federation needs it: run pip install 'fedauc[flower]'")
    if folder.exists():
        raise ValueError(f"{folder} exists already; choose another folder")
    for name in groups:
        if not name.replace("-", "").isalnum():
            raise ValueError(f"a site's name is {name!r}; use letters, digits and dashes")
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    home = folder.absolute()
    for place, source in FILES.items():
        text = (resources.files("fedauc.federation") / "template" / source).read_text(encoding="utf-8")
        text = text.replace("@OUT@", str(home / "run")).replace("@SITES@", str(home / "sites.toml"))
        (part / place).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(part / place, text.encode())
    write_atomically(part / ".gitignore", ("\n".join(IGNORED) + "\n").encode())
    make_certificates(part / "certificates", hosts)
    lines = {name: make_key(part / "keys" / name) for name in groups}
    table = "\n".join(_section(name, group, lines[name]) for name, group in groups.items())
    write_atomically(part / "sites.toml", table.encode())
    part.rename(folder)


def _section(name: str, group: str, key: str) -> str:
    return f'[{name}]\ngroup = "{group}"\nkey = "{key}"\n'
