"""Side-by-side speed on a CPU: fedauc and its peers on the same work, with the same result checked.

    python benchmarks/cpu.py
    python benchmarks/cpu.py --workloads linear,mlp --contenders fedauc,loop,jax --repeats 3

Run it under fedauc's own environment, on an idle machine. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path

from harness.ceilings import compute_floor, measure_ceilings
from harness.environments import HERE
from harness.prepare import prepare_work
from harness.race import TOLERANCE, Limits, Outcome, race_contenders
from harness.report import describe_hardware, format_table, list_failures, list_versions, make_rows, write_report
from harness.work import WORKLOADS

CONTENDERS = ("fedauc", "fedauc-1", "batched", "loop", "torch-loop", "jax", "fedjax", "pfl", "pfl-2", "flower")
ALWAYS = ("fedauc", "torch-loop")
"""What ratios are taken to, and what results are compared with."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Race on each workload, print the table, write the file."""
    options = _parse_options(arguments)
    before, limits = describe_hardware(), measure_ceilings(options.threads)
    outcomes: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory(prefix="fedauc-bench-") as folder:
        for workload in options.workloads:
            outcomes[workload] = _race_contenders(workload, options, Path(folder))
    rows, failed = make_rows(outcomes), list_failures(outcomes)
    report = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": before,
        "threads": options.threads,
        "ceilings": limits,
        "floors": {name: compute_floor(name, limits) for name in options.workloads},
        "tolerance": TOLERANCE,
        "workloads": {name: WORKLOADS[name]._asdict() for name in options.workloads},
        "versions": list_versions(outcomes),
        "rows": rows,
        "failed": failed,
    }
    write_report(options.out, report)
    print(f"{before['cpu']}, {before['cores']} cores, {options.threads} thread(s) each")
    print(format_table(rows, failed))
    print(", ".join(f"{name} {value:g}" for name, value in limits.items()))
    print(f"written to {options.out}")


def _race_contenders(workload: str, options: argparse.Namespace, folder: Path) -> list[Outcome]:
    print(f"{workload}: {', '.join(options.contenders)}", file=sys.stderr, flush=True)
    rounds = options.rounds or WORKLOADS[workload].rounds
    home = folder / workload
    home.mkdir()
    work = prepare_work(workload, rounds)
    work.save(home / "work.npz")
    limits = Limits(rounds, options.repeats, options.threads, options.patience)
    runners = tuple(dict.fromkeys((*ALWAYS, *options.contenders)))
    outcomes = race_contenders(runners, home / "work.npz", work.start, limits)
    _keep_logs(home)
    return [outcome for outcome in outcomes if outcome.contender in ("fedauc", *options.contenders)]


def _keep_logs(home: Path) -> None:
    logs = HERE / "out" / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for log in home.glob("*.log"):
        (logs / f"{home.name}-{log.name}").write_text(log.read_text(errors="replace"))


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=_parse_names(WORKLOADS), default=list(WORKLOADS), help=",".join(WORKLOADS))
    parser.add_argument(
        "--contenders", type=_parse_names(CONTENDERS), default=list(CONTENDERS), help=",".join(CONTENDERS)
    )
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each contender (7)")
    parser.add_argument("--rounds", type=int, default=0, help="rounds per measurement (the workload's own)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each contender's libraries (1)")
    parser.add_argument("--patience", type=float, default=60, help="seconds after which a slow contender rests (60)")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "cpu.json", help="the JSON file")
    return parser.parse_args(arguments)


def _parse_names(known: Collection[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not known; choose from {', '.join(known)}")
        return names

    return parse


if __name__ == "__main__":
    main()
