"""A Flower app that is ready to run: files from the template, certificates, keys, and the server's table."""

from __future__ import annotations

import datetime
import ipaddress
import os
import shutil
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedauc.experiments.checkpoint import write_atomically

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


def create_app_folder(
    folder: Path, groups: Mapping[str, str], hosts: Sequence[str] = ("localhost", "127.0.0.1")
) -> None:
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
    create_certificates(part / "certificates", hosts)
    lines = {name: create_key_pair(part / "keys" / name) for name in groups}
    table = "\n".join(_section(name, group, lines[name]) for name, group in groups.items())
    write_atomically(part / "sites.toml", table.encode())
    part.rename(folder)


def _section(name: str, group: str, key: str) -> str:
    return f'[{name}]\ngroup = "{group}"\nkey = "{key}"\n'


DAYS = 365


def create_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """ca.pem, server.pem and server.key for a server under these names or addresses."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    folder.mkdir(parents=True, exist_ok=True)
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    texts = ("fedauc trial authority", hosts[0])
    issuer, subject = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in texts)
    root = _certificate(issuer, issuer, authority.public_key(), authority, x509.BasicConstraints(True, None))
    alternatives = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
    bounds = (x509.BasicConstraints(False, None), alternatives)
    plain = _certificate(subject, issuer, server.public_key(), authority, *bounds)
    _write(folder / "ca.pem", root, secret=False)
    _write(folder / "server.pem", plain, secret=False)
    _write(folder / "server.key", _private(server, "PKCS8"), secret=True)


def create_key_pair(path: Path) -> str:
    """A site's key pair, `path` and `path.pub`, as `ssh-keygen -t ecdsa -b 384` makes it; returns the public line."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    path.parent.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    form = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    line: bytes = key.public_key().public_bytes(*form)
    _write(path, _private(key, "OpenSSH"), secret=True)
    _write(path.with_name(f"{path.name}.pub"), line + b"\n", secret=False)
    return line.decode()


def _certificate(subject: Any, issuer: Any, key: Any, signer: Any, *extensions: Any) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
    made = made.not_valid_before(now - datetime.timedelta(minutes=5))
    made = made.not_valid_after(now + datetime.timedelta(days=DAYS))
    for extension in extensions:
        made = made.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
    pem: bytes = made.sign(signer, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)
    return pem


def _alternative(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: Any, form: str) -> bytes:
    from cryptography.hazmat.primitives import serialization

    kind = getattr(serialization.PrivateFormat, form)
    made: bytes = key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())
    return made


def _write(path: Path, content: bytes, secret: bool) -> None:
    # Created with its final mode, so that a secret is at no time readable by others.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
        file.write(content)
