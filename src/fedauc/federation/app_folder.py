"""A Flower app that is ready to run: files from the template, trial certificates and keys, and the site table.

In a real deployment the server's certificate comes from an authority that everyone trusts already, and each site
creates its own key.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedauc.federation.schema import SCHEMA_FILE, DataSchema
from fedauc.federation.versions import FLOWER_REQUIREMENT
from fedauc.files import write_atomically

APP_TEMPLATE = resources.files("fedauc.federation") / "template"

IGNORED_BY_GIT = (
    *("certificates/", "keys/", "sites.toml", "sites/", "run/", "flower/", "logs/", "__pycache__/"),
    *("deploy/image/wheels/*.whl", "deploy/sites/*/data/", "deploy/sites/*/secrets/", "deploy/sites/*/state/"),
)
"""What must never be published with the app."""

CERTIFICATE_DAYS = 365

OWN_ADDRESS = "127.0.0.1"
"""Where the SuperLink's own processes connect to it. Without it in the server's certificate no run ever begins."""


def create_app_folder(
    folder: Path,
    groups: Mapping[str, str],
    hosts: Sequence[str] = ("localhost", "127.0.0.1"),
    schema: DataSchema | None = None,
) -> None:
    """Write an app for these sites (name to group), completely or not at all."""
    if find_spec("flwr") is None:
        raise ValueError(f"flwr is not installed here; a federation needs it: run pip install '{FLOWER_REQUIREMENT}'")
    if folder.exists():
        raise ValueError(f"{folder} exists already; choose another folder")
    for name in groups:
        if not name.replace("-", "").isalnum():
            raise ValueError(f"a site's name is {name!r}; use letters, digits and dashes")
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    (part / "fedauc_app").mkdir(parents=True)
    for template in APP_TEMPLATE.iterdir():
        text, name = fill_template(template.name, folder, schema is not None), template.name.removesuffix(".template")
        # Python files belong to the app's package; the others stand beside it.
        write_atomically((part / "fedauc_app" if name.endswith(".py") else part) / name, text.encode())
    write_atomically(part / ".gitignore", ("\n".join(IGNORED_BY_GIT) + "\n").encode())
    if schema is not None:
        write_atomically(part / SCHEMA_FILE, schema.to_toml().encode())
    create_certificates(part / "certificates", hosts)
    sections = [
        f'[{name}]\ngroup = "{group}"\nkey = "{create_key_pair(part / "keys" / name)}"\n'
        for name, group in groups.items()
    ]
    write_atomically(part / "sites.toml", "\n".join(sections).encode())
    part.rename(folder)


def fill_template(name: str, folder: Path, has_schema: bool = False) -> str:
    """The text of a file of the template, with the paths of an app's folder."""
    text, schema = (APP_TEMPLATE / name).read_text(encoding="utf-8"), str(folder.absolute() / SCHEMA_FILE)
    paths = {"@OUT@": str(folder.absolute() / "run"), "@SITES@": str(folder.absolute() / "sites.toml")}
    for placeholder, path in (paths | {"@SCHEMA@": schema if has_schema else ""}).items():
        text = text.replace(placeholder, path)
    return text


def create_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Write ca.pem, server.pem and server.key for a server with these names or addresses, and for `OWN_ADDRESS`."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    folder.mkdir(parents=True, exist_ok=True)
    ca_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    # A name of its own: where sites trust an old and a new authority, TLS looks for the right one by its name.
    name = f"fedauc trial authority {secrets.token_hex(4)}"
    issuer, subject = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (name, hosts[0]))
    alternatives: list[x509.GeneralName] = []
    for host in dict.fromkeys([*hosts, OWN_ADDRESS]):
        try:
            alternatives.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            alternatives.append(x509.DNSName(host))
    extensions = (x509.BasicConstraints(False, None), x509.SubjectAlternativeName(alternatives))
    authority = _sign_certificate(issuer, issuer, ca_key.public_key(), ca_key, x509.BasicConstraints(True, None))
    server = _sign_certificate(subject, issuer, server_key.public_key(), ca_key, *extensions)
    _write_file(folder / "ca.pem", authority, secret=False)
    _write_file(folder / "server.pem", server, secret=False)
    _write_file(folder / "server.key", _private_key_bytes(server_key, "PKCS8"), secret=True)


def create_key_pair(path: Path) -> str:
    """Write a site's keys `path` and `path.pub`, as `ssh-keygen -t ecdsa -b 384` does; returns the public line."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    path.parent.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    line: bytes = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write_file(path, _private_key_bytes(key, "OpenSSH"), secret=True)
    _write_file(path.with_name(f"{path.name}.pub"), line + b"\n", secret=False)
    return line.decode()


def _sign_certificate(subject: Any, issuer: Any, key: Any, ca_key: Any, *extensions: Any) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(minutes=5))
    builder = builder.not_valid_after(now + datetime.timedelta(days=CERTIFICATE_DAYS))
    for extension in extensions:
        builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
    pem: bytes = builder.sign(ca_key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)
    return pem


def _private_key_bytes(key: Any, format_name: str) -> bytes:
    from cryptography.hazmat.primitives import serialization

    key_format = getattr(serialization.PrivateFormat, format_name)
    pem: bytes = key.private_bytes(serialization.Encoding.PEM, key_format, serialization.NoEncryption())
    return pem


def _write_file(path: Path, content: bytes, secret: bool) -> None:
    # The file is created with its final mode, so that a secret is never readable by others.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
        file.write(content)
