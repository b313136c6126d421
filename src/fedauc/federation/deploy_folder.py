"""The folder `deploy/` of an app: files that start its server and its sites, with names, hosts and ports filled in.

There are three ways to start them: containers with a compose file, Kubernetes, and systemd. The image is the same for
the server, its operator and the sites. Files that exist with another content are kept unless they shall be replaced.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from fedauc.federation.schema import SCHEMA_FILE
from fedauc.files import write_atomically
from fedauc.version import VERSION

DEPLOY_FOLDER = "deploy"

SUPERLINK = "federation"
"""The SuperLink's name in the configuration that the server's commands use."""

DEFAULT_PORT = 9092

DEFAULT_IMAGE = f"localhost/fedauc:{VERSION}"

TORCH_VERSION = "2.13.0"
"""The version in the image, for which its other packages are locked."""

SHARED_FILES = ("pyproject.toml", "sites.toml", "flower/config.toml")
"""What the server needs of the app's folder besides its Python files and its schema."""


class Deployment(NamedTuple):
    """What the files hold: the app's folder on the server, the sites, and where the server can be reached."""

    app: Path
    sites: Sequence[str]
    host: str
    port: int = DEFAULT_PORT
    image: str = DEFAULT_IMAGE
    has_schema: bool = False


def write_deploy_folder(folder: Path, deployment: Deployment, replace: bool = False) -> list[Path]:
    """Write the files into an app's folder, which may still have another name; returns those that were kept.

    A file that exists with another content is kept, unless `replace` is set.
    """
    check_deployment(deployment)
    unchanged_files = []
    for name, text in make_deploy_files(deployment).items():
        path = folder / name
        if path.exists() and path.read_text(encoding="utf-8") != text and not replace:
            unchanged_files.append(path)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    authority = (folder / "certificates" / "ca.pem").read_bytes()
    for site in deployment.sites:
        home = folder / DEPLOY_FOLDER / "sites" / site
        for part, mode in (("config", 0o755), ("secrets", 0o700), ("state", 0o700), ("data", 0o755)):
            (home / part).mkdir(mode=mode, exist_ok=True)
        # The authority's certificate and the schema are copies: they belong to the app's folder.
        write_atomically(home / "config" / "ca.pem", authority)
        if deployment.has_schema:
            write_atomically(home / "config" / SCHEMA_FILE, (folder / SCHEMA_FILE).read_bytes())
    return unchanged_files


def make_deploy_files(deployment: Deployment) -> dict[str, str]:
    """The text of every file, by its path in the app's folder."""
    app_files = {name: name.rpartition("/")[2] for name in _list_app_files(deployment)}
    config_files = ["ca.pem", "policy.toml", *([SCHEMA_FILE] if deployment.has_schema else [])]
    values = {
        "APP": str(deployment.app),
        "HOST": deployment.host,
        "PORT": str(deployment.port),
        "IMAGE": deployment.image,
        "VERSION": VERSION,
        "TORCH": TORCH_VERSION,
        "USER": f"{os.getuid()}:{os.getgid()}",
        "SCHEMA_OPTION": f" --schema /etc/fedauc/{SCHEMA_FILE}" if deployment.has_schema else "",
        "HARDENING": _read_template("hardening.conf").rstrip(),
        "APP_FILES": "\n".join(f"      - {key}={name}" for name, key in app_files.items()),
        "APP_ITEMS": "\n".join(f"              - {{key: {key}, path: {name}}}" for name, key in app_files.items()),
        "CONFIG_FILES": "\n".join(f"      - config/{name}" for name in config_files),
    }
    layout = {
        "kustomization.yaml": "server-kustomization.yaml",
        "flower/config.toml": "flower-config.toml",
        "deploy/README.md": "README.md",
        "deploy/image/Dockerfile": "Dockerfile",
        "deploy/image/.dockerignore": "dockerignore",
        "deploy/image/requirements.txt": "requirements.txt",
        "deploy/image/wheels/README": "wheels-README",
        "deploy/server/compose.yaml": "server-compose.yaml",
        "deploy/server/kubernetes.yaml": "server-kubernetes.yaml",
        "deploy/server/fedauc-server.service": "server.service",
        "deploy/server/sysusers.conf": "sysusers.conf",
    }
    files = {path: _fill_in(_read_template(name), values) for path, name in layout.items()}
    for site in deployment.sites:
        home, site_name = f"deploy/sites/{site}", site.lower()
        site_values = values | {"SITE": site, "DNS_SITE": site_name}
        for path, name in (
            ("compose.yaml", "site-compose.yaml"),
            ("kubernetes.yaml", "site-kubernetes.yaml"),
            ("kustomization.yaml", "site-kustomization.yaml"),
            (f"fedauc-{site_name}.service", "site.service"),
            ("sysusers.conf", "sysusers.conf"),
        ):
            files[f"{home}/{path}"] = _fill_in(_read_template(name), site_values)
    return files


def check_deployment(deployment: Deployment) -> None:
    """Refuse values that would mean something else inside a file."""
    for name, text in (("app", str(deployment.app)), ("host", deployment.host), ("image", deployment.image)):
        if not text or any(not (letter.isalnum() or letter in "/._-:@+") for letter in text):
            allowed = "letters, digits and / . _ - : @ +, because it is written into configuration files"
            raise ValueError(f"{name} is {text!r}; use {allowed}")
    if not 0 < deployment.port < 65536:
        raise ValueError(f"port is {deployment.port}; it must be between 1 and 65535")
    lower = [site.lower() for site in deployment.sites]
    for site in deployment.sites:
        if lower.count(site.lower()) > 1:
            raise ValueError(f"site {site!r} differs from another one in capital letters only; use another name")


def _list_app_files(deployment: Deployment) -> list[str]:
    template = resources.files("fedauc.federation") / "template"
    names = sorted(member.name.removesuffix(".template") for member in template.iterdir())
    code = [f"fedauc_app/{name}" for name in names if name.endswith(".py")]
    return [*SHARED_FILES, *([SCHEMA_FILE] if deployment.has_schema else []), *code]


def _read_template(name: str) -> str:
    return (resources.files("fedauc.federation") / "deploy_template" / name).read_text(encoding="utf-8")


def _fill_in(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text
