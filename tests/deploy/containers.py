"""Real containers without a daemon and without a registry: podman, an image built here, and a stand-in for its base.

The stand-in for docker.io/library/python:3.11-slim-bookworm is the same release of Debian with its own Python, made by
mmdebstrap. Where the kernel's control groups are of a kind that crun does not run with, containers run without them, in
a mount namespace that shows the other kind. They share the network of the machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Self

import pytest

from fedauc.federation.deploy_folder import DEFAULT_IMAGE, TORCH_VERSION

ROOT = Path(__file__).parents[2]

STORE = Path(os.environ.get("DEPLOY_STORE", Path.home() / ".cache" / "fedauc-deploy"))
"""Images and layers; a second call needs a minute instead of ten."""

BASE_IMAGE = "localhost/python:3.11-slim-bookworm"

PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"

PROGRAMS = ("podman", "crun", "mmdebstrap", "unshare", "nsenter")

ENGINE_SETTINGS = """
[containers]
cgroups = "disabled"
netns = "host"
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
"""

STORAGE_SETTINGS = """
[storage]
driver = "overlay"
graphroot = "{store}/store"
runroot = "{store}/run"
"""

HIDE_CONTROL_GROUPS = "umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup && echo ready && exec sleep 86400"


class ContainerEngine:
    """podman in a mount namespace of its own. Leaving the `with` block removes the containers of this test."""

    def __init__(self) -> None:
        if os.getuid() or (missing := [name for name in PROGRAMS if shutil.which(name) is None]):
            what = "root" if os.getuid() else ", ".join(missing)
            pytest.skip(f"starting containers here needs {what}")
        STORE.mkdir(parents=True, exist_ok=True)
        (STORE / "containers.conf").write_text(ENGINE_SETTINGS)
        (STORE / "storage.conf").write_text(STORAGE_SETTINGS.format(store=STORE))
        self._environment = {
            **os.environ,
            "CONTAINERS_CONF": str(STORE / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(STORE / "storage.conf"),
        }
        self._projects: list[tuple[Path, dict[str, str]]] = []

    def __enter__(self) -> Self:
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", HIDE_CONTROL_GROUPS]
        self._namespace = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._namespace.stdout is not None
        if self._namespace.stdout.readline() != "ready\n":
            pytest.skip("this kernel lets nobody mount control groups, so that no container can be started")
        return self

    def __exit__(self, *error: object) -> None:
        for folder, settings in reversed(self._projects):
            self.compose(folder, "down", "--timeout", "5", settings=settings, check=False)
        self._namespace.kill()
        self._namespace.communicate()

    def run(
        self, *words: str | Path, check: bool = True, folder: Path | None = None, settings: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A command inside the namespace."""
        command = ["nsenter", "--target", str(self._namespace.pid), "--mount", "--wd=" + str(folder or Path.cwd())]
        done = subprocess.run(
            [*command, *map(str, words)],
            env={**self._environment, **(settings or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-3000:])
        return done

    def compose(
        self, folder: Path, *words: str, settings: dict[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """podman-compose in a folder, with the file `sandbox.yaml` on top of `compose.yaml`."""
        if words[0] == "up":
            self._projects.append((folder, settings or {}))
        program = Path(sys.executable).parent / "podman-compose"
        files = ("--in-pod", "false", "--file", "compose.yaml", "--file", "sandbox.yaml")
        return self.run(program, *files, *words, folder=folder, settings=settings, check=check)

    def build_image(self, context: Path, scratch: Path) -> None:
        """Build the image as deploy/image/ says, from the stand-in, with a wheel of this working tree."""
        if self.run("podman", "image", "exists", BASE_IMAGE, check=False).returncode:
            archive = scratch / "base.tar"
            subprocess.run(
                ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(archive)], check=True
            )
            self.run("podman", "import", archive, BASE_IMAGE)
        build = [sys.executable, str(ROOT / "packaging" / "build_distributions.py"), str(scratch / "dist")]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = (scratch / "dist").glob("*.whl")
        shutil.copy(wheel, context / "wheels")
        # pip's settings of this machine, and torch from an index of one file, as TORCH_INDEX allows.
        index = scratch / "index" / "torch"
        index.mkdir(parents=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(index)]
        subprocess.run([*pip, f"torch=={TORCH_VERSION}"], check=True)
        (torch_wheel,) = index.iterdir()
        (index / "index.html").write_text(f'<a href="{torch_wheel.name.replace("+", "%2B")}">torch</a>')
        mounts = [f"{index.parent}:/mnt/index:ro"]
        mounts += [f"{path}:{path}:ro" for path in ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")]
        self.run(
            *("podman", "build", "--format", "docker", "--isolation", "chroot", "--network", "host"),
            *("--build-arg", f"PYTHON_IMAGE={BASE_IMAGE}", "--build-arg", "TORCH_INDEX=file:///mnt/index"),
            *(word for mount in mounts if Path(mount.split(":")[0]).exists() for word in ("--volume", mount)),
            *("--tag", DEFAULT_IMAGE, context),
        )
