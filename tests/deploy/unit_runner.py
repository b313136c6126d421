"""The commands of systemd units without systemd: the same words, environment, user, key and folders.

A mount namespace shows a command what the unit shows it: everything is read-only except what the unit allows, /tmp is
its own, and the paths that it names lead to folders of the test. What systemd does besides (filters of system calls,
hidden devices and processes, restarts) is checked by systemd-analyze alone.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

USER = 12345
"""An unprivileged user without a name and a home."""

SCRIPT = """
set -e
scratch=$(mktemp -d)
mount -t tmpfs tmpfs "$scratch"
mkdir "$scratch/upper" "$scratch/work" "$scratch/python"
# An interpreter below a home that nobody else may enter.
mount --bind {python} "$scratch/python"
case {python} in /root/*)
  mount -t tmpfs -o mode=755 tmpfs /root; mkdir -p {python}; mount --bind "$scratch/python" {python};;
esac
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$scratch/upper,workdir=$scratch/work" /etc
echo "127.0.0.1 localhost {host}" > /etc/hosts
for folder in /opt /srv /var/lib /run; do mount -t tmpfs -o mode=755 tmpfs $folder; done
{mounts}
mount -o remount,bind,ro /
mount -t tmpfs -o mode=1777 tmpfs /tmp
cd /
exec setpriv --reuid {user} --regid {user} --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""


class Unit(NamedTuple):
    """What a unit says: its command, its environment, and the key that systemd hands to it."""

    command: list[str]
    environment: dict[str, str]
    credential: tuple[str, str]


def read_unit(text: str) -> Unit:
    """The parts of a unit that decide what runs. Repeated settings add up, as in systemd."""
    joined = text.replace("\\\n", " ")
    settings: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", joined, re.MULTILINE):
        settings.setdefault(name, []).append(value)
    environment = dict(word.split("=", 1) for line in settings["Environment"] for word in shlex.split(line))
    name, _, path = settings["LoadCredential"][0].partition(":")
    environment["CREDENTIALS_DIRECTORY"] = "/run/credentials"
    command = [
        word.replace("${CREDENTIALS_DIRECTORY}", "/run/credentials") for word in shlex.split(settings["ExecStart"][0])
    ]
    return Unit(command, environment, (name, path))


def start_unit(
    unit: Unit, folders: Mapping[str, tuple[Path, bool]], key: Path, log: Path, command: list[str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a unit's command, or another one in its place; folders say what a path shows, and if it can be written."""
    lines = [
        f"mkdir -p {path}; mount --bind {folder} {path}" + ("" if is_writable else f"; mount -o remount,bind,ro {path}")
        for path, (folder, is_writable) in {**folders, "/opt/fedauc": (Path(sys.prefix), False)}.items()
    ]
    lines.append(f"mkdir /run/credentials; cp {key} /run/credentials/{unit.credential[0]}")
    lines.append(f"chown -R {USER} /run/credentials; chmod 400 /run/credentials/*")
    script = SCRIPT.format(python=sys.base_prefix, host="fed.example.org", mounts="\n".join(lines), user=USER)
    words = command or unit.command
    with log.open("ab") as output:
        return subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "unit", *words],
            env=unit.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop_unit(process: subprocess.Popen[bytes]) -> int:
    """Stop it as systemd does; returns the exit code."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
