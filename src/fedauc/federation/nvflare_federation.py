"""The files of a federation on NVFlare: the project to provision, a site's own settings, and a job per run.

`LocalFlare` starts a federation on this machine from startup kits with certificates, for a trial or a test.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedauc.federation.agreement import read_sites
from fedauc.federation.local_federation import LocalProcesses, find_free_port, find_program
from fedauc.federation.run_config import read_run_config
from fedauc.federation.toml_files import read_toml_file
from fedauc.files import write_atomically

TASK_NAME = "fedauc"
"""The name of the one task that a job has: to answer a message."""

SITE_FILE = "fedauc.toml"
"""The site's own file in the `local` folder of its startup kit; NVFlare's authority does not sign that folder."""

PARTS = tuple(f"fedauc.federation.nvflare.{name}" for name in ("RunController", "SiteExecutor"))
"""What a server and a site must allow a job to use."""

TASK_INTERVAL = 0.1
"""Seconds between two questions of a site for a task; NVFlare's own default is two."""

SERVER_NAME, ADMIN_NAME = "localhost", "admin@fedauc.example"
"""The participants of a local federation beside its sites."""


def write_project(path: Path, sites: Sequence[str], server: str, admin: str, port: int = 8002) -> None:
    """Write the project from which `nvflare provision` makes a startup kit, with a certificate, per participant."""
    participants = [
        f"{{name: {server}, type: server, org: fedauc, fed_learn_port: {port}}}",
        *(f"{{name: {site}, type: client, org: fedauc}}" for site in sites),
        f"{{name: {admin}, type: admin, org: fedauc, role: project_admin}}",
    ]
    parts = ("workspace.Workspace", "static_file.StaticFile", "cert.Cert", "signature.Signature")
    lines = ["api_version: 3", "name: federation", "description: a federation with fedauc", "participants:"]
    lines += [f"  - {participant}" for participant in participants]
    lines += ["builders:", *(f"  - path: nvflare.lighter.impl.{part}Builder" for part in parts)]
    write_atomically(path, ("\n".join(lines) + "\n").encode())


def allow_fedauc(kit: Path, site_config: Mapping[str, str] | None = None) -> None:
    """Let a participant's jobs use fedauc: add its two classes to the list of allowed ones in `local/resources.json`.

    `site_config` is what a site's owner decides: `data`, `state` and `policy`, added to `local/fedauc.toml`. The site
    then takes no code from jobs, and no shell commands: NVFlare allows both, and they pass no policy of ours.
    """
    local = kit / "local"
    resources = _read_local_file(local, "resources.json")
    resources["class_allow_list"] = list(dict.fromkeys([*resources.get("class_allow_list", ()), *PARTS]))
    write_atomically(local / "resources.json", json.dumps(resources, indent=2).encode())
    if site_config is not None:
        rights = _read_local_file(local, "authorization.json")
        names = {name for rules in rights["permissions"].values() if isinstance(rules, dict) for name in rules}
        for role, rules in rights["permissions"].items():
            rules = rules if isinstance(rules, dict) else dict.fromkeys(sorted(names), rules)
            rights["permissions"][role] = {**rules, "byoc": "none", "shell_commands": "none"}
        write_atomically(local / "authorization.json", json.dumps(rights, indent=2).encode())
        known = read_toml_file(local / SITE_FILE, "file", "call allow") if (local / SITE_FILE).is_file() else {}
        lines = [
            f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in (known | {**site_config}).items()
        ]
        write_atomically(local / SITE_FILE, "".join(lines).encode())


def _read_local_file(local: Path, name: str) -> dict[str, Any]:
    """A file of a startup kit as its owner has written it, or else as NVFlare has."""
    for path in (local / name, local / f"{name}.default"):
        if path.is_file():
            return dict(json.loads(path.read_text(encoding="utf-8")))
    raise ValueError(f"{local.parent} is no startup kit: local/{name}.default is missing; give one that NVFlare made")


def write_job(folder: Path, settings: Mapping[str, Any], min_sites: int = 0) -> None:
    """Write a job for `nvflare job submit`: the settings are those of a Flower app's run configuration.

    Only the server's part holds them, so that no site learns the groups or the server's paths. NVFlare ends the job
    when fewer than `min_sites` sites are alive; unless given, when one has died.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists already; choose another folder")
    sites = read_sites(Path(str(settings["sites"])))
    for site in sites:
        if site.key:
            reason = "NVFlare identifies a site by the name in its certificate: leave out key"
            raise ValueError(f"site {site.name!r} has the key {site.key[:40]!r} in the site table, but {reason}")
    read_run_config(settings, sites)
    names = [site.name for site in sites]
    meta: dict[str, Any] = {"name": folder.name, "resource_spec": {}, "min_clients": min_sites or len(names)}
    meta["deploy_map"] = {"coordinator": ["server"], "site": names}
    controller, executor = ({"path": path, "args": {}} for path in PARTS)
    server = {
        "format_version": 2,
        "server": {"task_request_interval": TASK_INTERVAL},
        "workflows": [{"id": "fedauc", **controller, "args": {"settings": dict(settings)}}],
    }
    client = {
        "format_version": 2,
        "default_task_fetch_interval": TASK_INTERVAL,
        "executors": [{"tasks": [TASK_NAME], "executor": executor}],
    }
    server_path, client_path = "coordinator/config/config_fed_server.json", "site/config/config_fed_client.json"
    for name, content in {"meta.json": meta, server_path: server, client_path: client}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{json.dumps(content, indent=2)}\n".encode())


class LocalFlare(LocalProcesses):
    """A server and sites of NVFlare on this machine, each from its startup kit. Leaving the `with` block stops them."""

    def __init__(self, folder: Path, groups: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder)
        project, kits = self.folder / "project.yml", self.folder / "kits"
        write_project(project, list(groups), SERVER_NAME, ADMIN_NAME, find_free_port())
        self.run_nvflare("provision", "-p", str(project), "-w", str(kits), "--force")
        self.kits = kits / "federation" / "prod_00"
        sections = [f'[{name}]\ngroup = "{group}"\n' for name, group in groups.items()]
        write_atomically(self.folder / "sites.toml", "\n".join(sections).encode())
        allow_fedauc(self.kits / SERVER_NAME)
        for name in groups:
            home = self.folder / "sites" / name
            allow_fedauc(self.kits / name, {"data": str(home / "rows"), "state": str(home / "state")})

    def start_participant(self, name: str) -> None:
        """Start the server or a site as its startup kit does, without the loop that would start it again."""
        self.start_process(name, "/bin/bash", str(self.kits / name / "startup" / "sub_start.sh"), "--once")

    def submit_run(self, settings: Mapping[str, Any], min_sites: int = 0) -> str:
        """Submit a job with these settings beside those of this folder, and return its id."""
        job = self.folder / "jobs" / f"job-{time.time_ns()}"
        paths = {"out": str(self.folder / "run"), "sites": str(self.folder / "sites.toml")}
        write_job(job, {**paths, **settings}, min_sites)
        return str(self.run_job_command("submit", "-j", str(job))["job_id"])

    def wait_for_end(self, job_id: str, seconds: float) -> str:
        """What NVFlare says of a job when it has ended, or after so many seconds, such as FINISHED:COMPLETED."""
        deadline, status = time.monotonic() + seconds, ""
        while not status.startswith("FINISHED") and time.monotonic() < deadline:
            status = str(self.run_job_command("meta", job_id)["status"])
        return status

    def run_job_command(self, command: str, *arguments: str) -> dict[str, Any]:
        """The data that an `nvflare job` command prints, with the startup kit of the administrator."""
        kit = ("--startup-kit", str(self.kits / ADMIN_NAME))
        return dict(json.loads(self.run_nvflare("--format", "json", "job", command, *arguments, *kit))["data"])

    def run_nvflare(self, *arguments: str) -> str:
        """Run an `nvflare` command of this Python environment and return its output."""
        command, folder = [str(find_program("nvflare")), *arguments], self.working_folder
        done = subprocess.run(command, cwd=folder, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            output = " ".join(f"{done.stdout} {done.stderr}".split())[-300:]
            raise ValueError(f"`nvflare {arguments[0]}` ended with exit code {done.returncode}: {output}")
        return done.stdout
