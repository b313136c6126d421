"""The command doctor: whether this installation can train, what else there is, and how to get it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer

from fedauc import plugins
from fedauc.cli.lazy_import import finish_imports
from fedauc.version import VERSION

LEAST_FREE = 200_000_000
"""Free bytes on a disk below which runs are likely to fail: checkpoints of a small image model take some 100 MB."""

INTERNAL_EXTRAS = ("dev", "docs", "paper")
"""Extras for work on the library itself."""

PURPOSES = {
    "cli": "the command line, and curves",
    "report": "fedauc report",
    "frames": "tables from Parquet and Arrow, and data frames",
    "export": "fedauc export",
    "sklearn": "FederatedAUCClassifier",
    "tune": "fedauc tune",
    "privacy": "private runs, secure sums and signatures",
    "flower": "federations on Flower, in an environment of their own",
    "nvflare": "federations on NVFlare, in an environment of their own",
    "mlflow": "tracking with MLflow",
    "tensorboard": "tracking with TensorBoard",
    "trackio": "tracking with Trackio",
    "wandb": "tracking with Weights & Biases",
}
"""What each extra is for."""


class Finding(NamedTuple):
    """What a check has found. Only `broken` needs a remedy; `optional` is not here, and not needed."""

    topic: str
    status: Literal["ok", "optional", "broken"]
    text: str


def doctor(
    folder: Annotated[Path, typer.Option("--folder", help="Where runs are to be written.")] = Path(),
) -> None:
    """Check the installation: versions, extras, threads and GPU, disk, plug-ins, and a short training run.

    The exit code is 1 if something is broken.

    Example: [bold]fedauc doctor[/bold]
    """
    from rich.console import Console
    from rich.table import Table

    finish_imports()
    colours = {"ok": "green", "optional": "yellow", "broken": "bold red"}
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=False)
    findings = list(examine_installation(folder))
    for topic, status, text in findings:
        table.add_row(f"[{colours[status]}]{status}[/]", topic, text)
    Console().print(table)
    broken = sum(finding.status == "broken" for finding in findings)
    if broken:
        print(f"{broken} of {len(findings)} checks failed", file=sys.stderr)
        raise typer.Exit(1)
    print("Everything that training needs is here.")


def examine_installation(folder: Path) -> Iterator[Finding]:
    """Every check in turn; one that fails unexpectedly is a finding too, and does not stop the others."""
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": check_versions,
        "extras": check_extras,
        "devices": check_devices,
        "disk": lambda: check_disk(folder),
        "plug-ins": check_plugins,
        "training": check_training,
    }
    for topic, check in checks.items():
        try:
            yield from check()
        except Exception as error:
            yield Finding(topic, "broken", f"the check failed with {plugins.describe_error(error)}")


def check_versions() -> Iterator[Finding]:
    """Python and the two packages that the core needs."""
    supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    text = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    yield Finding("python", "ok" if supported else "broken", text + ("" if supported else "; use Python 3.11 to 3.13"))
    yield Finding("fedauc", "ok", f"{VERSION}, in {Path(__file__).parent.parent}")
    for package, least, below in (("torch", (2, 11), (2, 14)), ("numpy", (2, 0), (3, 0))):
        installed = version(package)
        numbers = tuple(map(int, re.findall(r"\d+", installed)[:2]))
        fits = least <= numbers < below
        bounds = f"{'.'.join(map(str, least))} or later, below {'.'.join(map(str, below))}"
        yield Finding(package, "ok" if fits else "broken", installed + ("" if fits else f"; it must be {bounds}"))


def check_extras() -> Iterator[Finding]:
    """The optional packages, by extra; one that is not here comes with its purpose and the command that installs it."""
    try:
        requirements = requires("fedauc") or []
    except PackageNotFoundError:
        yield Finding("extras", "optional", "fedauc runs from its source; `pip install .` in a clone installs it")
        return
    packages: dict[str, list[str]] = {}
    for requirement in requirements:
        if match := re.match(r"""([\w.-]+)(\[[^\]]*\])?(.*?);.*extra == ["']([\w-]+)["']""", requirement):
            name, _, bounds, extra = match.groups()
            if extra not in INTERNAL_EXTRAS and name != "fedauc":
                packages.setdefault(extra, []).append(name + bounds.strip())
    for extra, requirements in packages.items():
        versions = {text: _find_version(re.split(r"[<>=!~ ]", text)[0]) for text in requirements}
        missing = [text for text, installed in versions.items() if installed is None]
        if missing:
            purpose = f"for {PURPOSES[extra]}: " if extra in PURPOSES else ""
            command = f"pip install {' '.join(repr(text) for text in missing)}"
            yield Finding(f"extra {extra}", "optional", purpose + command)
        else:
            versions_in_words = [
                f"{re.split(r'[<>=!~ ]', text)[0]} {installed}" for text, installed in versions.items()
            ]
            yield Finding(f"extra {extra}", "ok", ", ".join(versions_in_words))


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_devices() -> Iterator[Finding]:
    """The threads of torch, and whether each GPU can compute."""
    import torch

    cores = os.cpu_count() or 1
    yield Finding("threads", "ok", f"torch uses {torch.get_num_threads()} of {cores} cores (OMP_NUM_THREADS sets this)")
    if not torch.cuda.is_available():
        yield Finding("gpu", "ok", "torch sees none; runs use the CPU")
    for number in range(torch.cuda.device_count()):
        total = float(torch.ones(1000, device=f"cuda:{number}").sum())
        status: Literal["ok", "broken"] = "ok" if total == 1000.0 else "broken"
        yield Finding(f"gpu {number}", status, f"{torch.cuda.get_device_name(number)}; use --device cuda:{number}")


def check_disk(folder: Path) -> Iterator[Finding]:
    """Whether runs and parsed data can be written, and how much room there is."""
    from fedauc.data.io.stored import resolve_folder
    from fedauc.files import check_writable
    from fedauc.reports.tables import format_bytes

    for topic, path in (("runs", folder.absolute()), ("data", resolve_folder("").absolute())):
        try:
            check_writable(path / "run")
        except ValueError as error:
            yield Finding(f"folder of {topic}", "broken", str(error))
            continue
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        status: Literal["ok", "broken"] = "ok" if free >= LEAST_FREE else "broken"
        remedy = "" if status == "ok" else f"; runs need about {format_bytes(LEAST_FREE)}: free some"
        yield Finding(f"folder of {topic}", status, f"{path} can be written, {format_bytes(free)} free{remedy}")


def check_plugins() -> Iterator[Finding]:
    """Whether each plug-in, named by the user or installed, can be imported."""
    named = [name.strip() for name in os.environ.get(plugins.VARIABLE, "").split(",") if name.strip()]
    installed = [entry.value for entry in entry_points(group=plugins.GROUP)]
    if not named + installed:
        yield Finding("plug-ins", "ok", "none")
    for name in [*named, *installed]:
        try:
            plugins.import_plugin(name)
        except ValueError as error:
            yield Finding(f"plug-in {name}", "broken", str(error))
        else:
            yield Finding(f"plug-in {name}", "ok", "can be imported")


def check_training() -> Iterator[Finding]:
    """A short run on synthetic rows, which must learn to rank them."""
    import torch

    from fedauc.data.datasets.synthetic import Synthetic
    from fedauc.data.preparation import Preparation, prepare_table
    from fedauc.experiments.fitting import fit

    begin = time.perf_counter()
    split = prepare_table(Synthetic(clients=6, rows_per_client=50).load(0), Preparation(), 0)
    module = torch.nn.Linear(split.train.inputs.shape[1], 1)
    fitted = fit(module, split.train, "cycp-pairwise", test=split.test, groups=3, cycles=4, verbose=False)
    auc, seconds = fitted.history[-1][1]["auc"], time.perf_counter() - begin
    status: Literal["ok", "broken"] = "ok" if auc > 0.6 else "broken"
    yield Finding("training", status, f"{fitted.traffic.rounds} rounds in {seconds:.1f} s, AUC {auc:.3f}")


COMMANDS: dict[str, Callable[..., None]] = {"doctor": doctor}
"""The commands of this module."""
