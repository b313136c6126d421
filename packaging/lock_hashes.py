"""Write the pins of a constraint file with the SHA-256 of the files that pip would install for them here.

    python packaging/lock_hashes.py constraints.txt requirements-hashed.txt

The hashes belong to the Python version and the platform that the script runs on. Packages that come from a local file,
and torch, of which every platform and accelerator has a build of its own, are left out and named in the first lines:
install those first, from a source that you trust, then

    pip install --require-hashes --no-deps -r requirements-hashed.txt
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

OWN_BUILDS = ("torch",)
"""Packages whose files differ between channels, although their versions do not."""


def read_pins(constraints: Path) -> list[str]:
    """The pins of a constraint file, without its comments."""
    lines = (line.strip() for line in constraints.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def resolve_pins(pins: list[str]) -> list[dict[str, Any]]:
    """What pip would install for the pins, as its report describes it; nothing is installed."""
    with tempfile.TemporaryDirectory() as folder:
        pinned, report = Path(folder, "pins.txt"), Path(folder, "report.json")
        pinned.write_text("\n".join(pins) + "\n")
        options = ("--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", str(report))
        subprocess.run([sys.executable, "-m", "pip", "install", *options, "-r", str(pinned)], check=True)
        installed: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return installed


def write_lock(constraints: Path, lock: Path) -> list[str]:
    """Write the lock file; returns the packages that it leaves out."""
    pins = read_pins(constraints)
    chosen = [pin for pin in pins if pin.split("==")[0] not in OWN_BUILDS]
    left_out, lines = [pin for pin in pins if pin not in chosen], list[str]()
    versions = {pin.split("==")[0].lower().replace("_", "-"): pin for pin in chosen}
    for package in resolve_pins(chosen):
        name = package["metadata"]["name"].lower().replace("_", "-").replace(".", "-")
        pin, download = versions[name], package["download_info"]
        digest = download.get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest is None:
            left_out.append(pin)
        else:
            lines.append(f"{pin} --hash=sha256:{digest}")
    python = f"Python {platform.python_version_tuple()[0]}.{platform.python_version_tuple()[1]}"
    head = [
        f"# {constraints.name} with hashes, for {python} on {platform.system()} {platform.machine()}, by `make lock`.",
        f"# Left out, because their files differ between channels: {', '.join(left_out)}. Install them first.",
        f"# pip install --require-hashes --no-deps -r {lock.name}",
    ]
    lock.write_text("\n".join([*head, *sorted(lines, key=str.lower)]) + "\n")
    return left_out


if __name__ == "__main__":
    missing = write_lock(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"{sys.argv[2]} is written without {', '.join(missing)}")
