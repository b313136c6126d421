"""What a round costs as clients become many, and what a table of insurance size costs from its file on.

    python benchmarks/scale.py
    python benchmarks/scale.py --parts clients --repeats 5

Each case runs in a process of its own, whose peak memory the system counts. See `ABOUT` for what is in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from harness.report import describe_hardware, write_report

HERE = Path(__file__).resolve().parent

METHODS = ("cycp-pairwise", "cycp-fedavg")
FEW, MANY, ROWS_EACH, FEATURES = 1_000, 1_000_000, 4, 8
CYCLE_ROUNDS, CYCLES = 10, 40

ROWS, COLUMNS, INSURERS, POSITIVE_RATE = 4_031_752, 60, 50, 0.0007
BLOCK = 1 << 16
SOURCES = ("npy", "arrow", "parquet")

ABOUT = {
    "clients": f"{ROWS_EACH} rows of {FEATURES} float32 each, linear model, {CYCLE_ROUNDS} random groups, 10 clients a "
    "round, 16 local steps of 16+16 rows; ms_per_round is the median over a run, then over the runs",
    "insurance": f"{ROWS} rows x {COLUMNS} float32 in a memory-mapped .npy file (or in an Arrow or Parquet file, whose "
    "rows are laid out on disk the first time) that is not in the page cache, "
    f"{INSURERS} clients in 10 groups, linear model, cycp-pairwise, 32 local steps of 512+512 rows",
    "memory": "peak_mb is the process's largest resident set, which counts the touched pages of a mapped file, in "
    "millions of bytes; clients_peak_mb is what it was once the clients were made; "
    "imports_mb is the part of it that was there before any data; data_mb is inputs, labels and client numbers",
}


# ---------------------------------------------------------------------------------------------- inside a case's process


def time_many_clients(method: str, count: int) -> dict[str, Any]:
    """Rounds of one method with so many clients, all of the same size."""
    imports = _memory_after_imports()
    import numpy as np
    from torch import nn

    from fedauc.data.clients import Clients
    from fedauc.experiments.assembly import assemble_training
    from fedauc.experiments.recipe import Recipe

    draw = np.random.default_rng(0)
    client = np.repeat(np.arange(count, dtype=np.int32), ROWS_EACH)
    labels = np.tile(np.array([0, 1, 0, 0], dtype=np.int8), count)
    inputs = draw.standard_normal((len(client), FEATURES), dtype=np.float32)
    start = time.perf_counter()
    clients = Clients.from_arrays(inputs, labels, client)
    schedule = {"groups": CYCLE_ROUNDS, "per_round": 10, "cycles": CYCLES, "assignment": "random"}
    recipe = Recipe.of(method, weighting="clients", **schedule)
    training, _, state = assemble_training(recipe, nn.Linear(FEATURES, 1), clients)
    ready = time.perf_counter()
    times = _time_rounds(training, state)
    return {
        "ms_per_round": median(times) * 1e3,
        "ready_s": ready - start,
        **_describe_memory(imports, inputs.nbytes + labels.nbytes + client.nbytes),
    }


def time_large_table(folder: str, source: str) -> dict[str, Any]:
    """From the file to two cycles of learning."""
    imports = _memory_after_imports()
    import numpy as np
    from torch import nn

    from fedauc.data.clients import Clients
    from fedauc.experiments.assembly import assemble_training
    from fedauc.experiments.recipe import Recipe

    paths = [Path(folder) / f"{name}.npy" for name in ("inputs", "labels", "client")]
    start = time.perf_counter()
    if source == "npy":
        clients = Clients.from_arrays(np.load(paths[0], mmap_mode="r"), np.load(paths[1]), np.load(paths[2]))
    else:
        clients = Clients.from_file(str(Path(folder) / f"rows.{source}"), "y", "client")
    built = time.perf_counter() - start
    peak = _peak_memory()
    recipe = Recipe.of(
        "cycp-pairwise",
        groups=CYCLE_ROUNDS,
        cycles=2,
        local_steps=32,
        positives=512,
        negatives=512,
        weighting="clients",
        learning_rate=0.01,
    )
    training, _, state = assemble_training(recipe, nn.Linear(COLUMNS, 1), clients)
    times = _time_rounds(training, state, skip=0)
    scoring, *learning = (sum(times[start : start + CYCLE_ROUNDS]) for start in range(0, len(times), CYCLE_ROUNDS))
    return {
        "clients_s": built,
        "first_round_s": time.perf_counter() - start - sum(times[1:]),
        "scoring_cycle_s": scoring,
        "cycle_s": median(learning),
        "clients_peak_mb": peak,
        **_describe_memory(imports, sum(path.stat().st_size for path in paths)),
    }


def write_large_table(folder: str) -> dict[str, Any]:
    """Write the insurance table, client by chance, and push it out of the page cache."""
    import numpy as np

    draw = np.random.default_rng(0)
    inputs = np.lib.format.open_memmap(Path(folder) / "inputs.npy", "w+", np.float32, (ROWS, COLUMNS))
    for row in range(0, ROWS, BLOCK):
        block = inputs[row : row + BLOCK]
        block[:] = draw.standard_normal(block.shape, dtype=np.float32)
    inputs.flush()
    np.save(Path(folder) / "labels.npy", (draw.random(ROWS) < POSITIVE_RATE).astype(np.int8))
    np.save(Path(folder) / "client.npy", draw.integers(0, INSURERS, ROWS, dtype=np.int16))
    _write_columnar_files(Path(folder))
    return {}


def _write_columnar_files(folder: Path) -> None:
    """The same table in columns."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    inputs, labels, client = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("inputs", "labels", "client"))
    fields = [(f"x{number}", pa.float32()) for number in range(COLUMNS)]
    schema = pa.schema([*fields, ("y", pa.int8()), ("client", pa.int16())])
    with (
        pa.ipc.new_file(str(folder / "rows.arrow"), schema) as arrow,
        pq.ParquetWriter(folder / "rows.parquet", schema, use_dictionary=False) as parquet,
    ):
        for row in range(0, ROWS, BLOCK):
            block = slice(row, row + BLOCK)
            columns = [*np.ascontiguousarray(inputs[block].T), labels[block], client[block]]
            batch = pa.record_batch([pa.array(column) for column in columns], schema=schema)
            arrow.write_batch(batch)
            parquet.write_batch(batch)


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "clients": time_many_clients,
    "insurance": time_large_table,
    "generate": write_large_table,
}


def _time_rounds(training: Any, state: Any, skip: int = 2 * CYCLE_ROUNDS) -> list[float]:
    """Seconds of each round after the first few, which score and warm up."""
    times, last = [], time.perf_counter()
    for _ in training.rounds(state):
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return times[skip:]


def _memory_after_imports() -> float:
    """Peak memory in MB once everything is imported."""
    import fedauc.experiments.recipe  # noqa: F401

    return _peak_memory()


def _peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def _describe_memory(imports: float, data: int) -> dict[str, float]:
    peak, size = _peak_memory(), data / 1e6
    ratios = {"peak_over_data": peak / size, "net_peak_over_data": (peak - imports) / size}
    return {"imports_mb": imports, "data_mb": size, "peak_mb": peak, **ratios}


# ------------------------------------------------------------------------------------------------------ the driver


def main() -> None:
    """Run the cases, print their table, write the file."""
    options = _parse_options()
    if options.case:
        print(json.dumps(CASES[options.case](*json.loads(options.arguments))))
        return
    before = describe_hardware()
    rows: list[dict[str, Any]] = []
    if "clients" in options.parts:
        rows += _client_rows(options.repeats, options.threads)
    if "insurance" in options.parts:
        rows += _insurance_rows(options.repeats, options.threads)
    report = {"made": datetime.now(UTC).isoformat(timespec="seconds"), "hardware": before, "versions": _list_versions()}
    write_report(options.out, {**report, "threads": options.threads, "about": ABOUT, "rows": rows})
    print(f"{before['cpu']}, {before['cores']} cores, {options.threads} thread(s)")
    print(_format_table(rows))
    print(f"written to {options.out}")


def _client_rows(repeats: int, threads: int) -> list[dict[str, Any]]:
    """Few and many clients in turn, so that noise meets both alike; ratio = the time over that with few."""
    rows = []
    for method in METHODS:
        runs: dict[int, list[dict[str, Any]]] = {FEW: [], MANY: []}
        for _ in range(repeats):
            for count, done in runs.items():
                done.append(_run_case(threads, "clients", method, count))
        base = median(run["ms_per_round"] for run in runs[FEW])
        for count, done in runs.items():
            middle = _take_medians(done)
            ratio = middle["ms_per_round"] / base
            rows.append({"workload": "clients", "method": method, "clients": count, "ratio": ratio, **middle})
    return rows


def _insurance_rows(repeats: int, threads: int) -> list[dict[str, Any]]:
    """From a mapped array, and from columns: the first time, which lays out their rows, and after that."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="fedauc-scale-") as folder:
        os.environ["FEDAUC_DATA"] = str(Path(folder) / "home")
        _run_case(threads, "generate", folder)
        for source in SOURCES:
            first, again = list[dict[str, Any]](), list[dict[str, Any]]()
            for _ in range(repeats):
                shutil.rmtree(Path(folder) / "home", ignore_errors=True)
                for done in (again,) if source == "npy" else (first, again):
                    _drop_file_cache(Path(folder))
                    done.append(_run_case(threads, "insurance", folder, source))
            for when, done in ((f"{source}, first", first), (source, again)):
                if done:
                    row = {"workload": f"insurance ({when})", "method": METHODS[0], "clients": INSURERS}
                    rows.append({**row, **_take_medians(done)})
    return rows


def _take_medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Each number's median over the runs, and the largest peak of all."""
    middle = {name: median(run[name] for run in runs) for name in runs[0]}
    return {**middle, "largest_peak_mb": max(run["peak_mb"] for run in runs)}


def _drop_file_cache(folder: Path) -> None:
    """Write files to the disk and drop them from the page cache, so that reading them is part of the time."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _run_case(threads: int, case: str, *arguments: Any) -> dict[str, Any]:
    print(case, *arguments, file=sys.stderr, flush=True)
    command = [sys.executable, str(HERE / "scale.py"), "--case", case, "--arguments", json.dumps(arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    numbers: dict[str, Any] = json.loads(done.stdout)
    return numbers


def _list_versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"python": sys.version.split()[0], **{name: version(name) for name in ("fedauc", "torch", "numpy")}}


def _format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per case and number."""
    lines = ["| workload | method | clients | what | value |", "|---|---|---|---|---|"]
    for row in rows:
        where = f"| {row['workload']} | {row['method']} | {row['clients']} |"
        lines += [f"{where} {name} | {value:.4g} |" for name, value in list(row.items())[3:]]
    return "\n".join(lines)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["clients", "insurance"])
    parser.add_argument("--repeats", type=int, default=3, help="processes per case")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "scale.json")
    parser.add_argument("--case", choices=sorted(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--arguments", default="[]", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
