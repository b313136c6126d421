"""From the trainings of `tables.py` to a record with intervals, and from the record to the tables of docs/tables.md.

    python benchmarks/tables_summary.py benchmarks/out/tables.jsonl benchmarks/records/tables.json  # the record
    python benchmarks/tables_summary.py benchmarks/records/tables.json                              # as Markdown

An interval is a t-interval over the splits of a table. Splits share rows, so it shows how much the numbers depend on
the split, not what would happen on other data.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""The 97.5 % quantile of Student's t distribution, by the number of splits."""

CENTRAL, BOOSTING = "central-logistic", "central-boosting"
Row = Mapping[str, Any]
Record = dict[str, Any]


def compute_interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and bounds of the 95 % interval over splits; a single split has none."""
    half = T_95[len(values)] * stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return {"mean": mean(values), "low": mean(values) - half, "high": mean(values) + half}


def choose_settings(rows: Iterable[Row]) -> dict[tuple[str, str], dict[int, Row]]:
    """By table and contender: for every split the training with the highest validation AUC, among tuned settings."""
    best: dict[tuple[str, str], dict[int, Row]] = defaultdict(dict)
    for row in rows:
        splits = best[row["table"], row["contender"]]
        if row["tuned"] and row["validation"] > splits.get(row["seed"], {"validation": -1})["validation"]:
            splits[row["seed"]] = row
    return best


def summarise_comparison(rows: Sequence[Row]) -> list[Record]:
    """AUC of every contender on every table, and the paired difference to central logistic regression."""
    best, entries = choose_settings(rows), []
    for (table, contender), splits in best.items():
        central = best[table, CENTRAL]
        seeds = sorted(set(splits) & set(central))
        settings = Counter(json.dumps(splits[seed]["setting"]) for seed in seeds)
        entries.append(
            {
                "table": table,
                "contender": contender,
                "auc": compute_interval([splits[seed]["test"] for seed in seeds]),
                "difference": compute_interval([splits[seed]["test"] - central[seed]["test"] for seed in seeds]),
                "own": mean(splits[seed]["own"] for seed in seeds),
                "setting": json.loads(settings.most_common(1)[0][0]),
                "splits": len(seeds),
                "seconds": mean(splits[seed]["seconds"] for seed in seeds),
            }
        )
    return entries


def summarise_defaults(rows: Sequence[Row]) -> list[Record]:
    """For every fixed setting: the difference to central logistic regression, over tables, and on the worst table."""
    best = choose_settings(rows)
    differences: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if "/" in row["contender"] and row["seed"] in best[row["table"], CENTRAL]:
            reference = best[row["table"], CENTRAL][row["seed"]]["test"]
            key = (row["contender"], json.dumps(row["setting"]))
            differences[key][row["table"]].append(row["test"] - reference)
    entries = []
    for (contender, setting), by_table in differences.items():
        means = {table: mean(values) for table, values in by_table.items()}
        worst = min(means, key=means.__getitem__)
        entries.append(
            {
                "contender": contender,
                "setting": json.loads(setting),
                "difference": mean(means.values()),
                "worst": means[worst],
                "worst_table": worst,
                "tables": len(means),
            }
        )
    return entries


def write_number(value: float, sign: bool = False) -> str:
    """Three digits without the leading zero, as in .912 or +.004."""
    text = f"{value:+.3f}" if sign else f"{value:.3f}"
    return text.replace("0.", ".", 1)


def make_table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def describe_tables(record: Record) -> str:
    """What is in every table."""
    head = [
        "table",
        "a row is positive if",
        "rows",
        "positive",
        "sites",
        "rows of a site",
        "numbers + categories",
        "missing",
    ]
    body = [
        [
            f"`{table['name']}`",
            table["task"],
            f"{table['rows']:,}",
            f"{100 * table['positives'] / table['rows']:.1f} %",
            f"{table['sites']}: {table['site']}",
            f"{table['smallest_site']:,} to {table['largest_site']:,}",
            f"{table['numbers']} + {table['categories']}",
            f"{100 * table['missing_share']:.1f} %",
        ]
        for table in record["tables"]
    ]
    return make_table(head, body)


def list_sources(record: Record) -> str:
    """Where the tables come from, and their licences."""
    return "\n".join(f"- `{table['name']}`: {table['source']}, {table['licence']}." for table in record["tables"])


def find_entry(record: Record, table: str, contender: str) -> Record:
    """A contender's numbers on a table."""
    return next(entry for entry in record["comparison"] if (entry["table"], entry["contender"]) == (table, contender))


def list_contenders(record: Record) -> list[str]:
    """The contenders that have run on every table, in the order of the record."""
    counts = Counter(entry["contender"] for entry in record["comparison"])
    tables = {entry["table"] for entry in record["comparison"]}
    return [contender for contender, count in counts.items() if count == len(tables)]


def compare_contenders(record: Record) -> str:
    """The AUC of every contender (rows) on every table (columns)."""
    names = [table["name"] for table in record["tables"]]
    body = []
    for contender in list_contenders(record):
        entries = [find_entry(record, name, contender) for name in names]
        best = {
            name: max(find_entry(record, name, c)["auc"]["mean"] for c in list_contenders(record)) for name in names
        }
        cells = [
            f"{write_number(entry['auc']['mean'])} ± {write_number(entry['auc']['high'] - entry['auc']['mean'])}"
            + (" \\*" if entry["auc"]["mean"] == best[entry["table"]] else "")
            for entry in entries
        ]
        body.append([f"`{contender}`", *cells])
    return make_table(["test AUC", *(f"`{name}`" for name in names)], body)


def compare_with_central(record: Record) -> str:
    """The paired difference of every contender to central logistic regression."""
    names = [table["name"] for table in record["tables"]]
    body = []
    for contender in list_contenders(record):
        if contender != CENTRAL:
            spans = [find_entry(record, name, contender)["difference"] for name in names]
            cells = [f"{write_number(s['mean'], True)} ± {write_number(s['high'] - s['mean'])}" for s in spans]
            body.append([f"`{contender}`", *cells])
    return make_table(["AUC less central logistic", *(f"`{name}`" for name in names)], body)


def compare_own_rows(record: Record) -> str:
    """The mean over sites of the AUC on a site's own rows: its own models against the shared ones."""
    names = [table["name"] for table in record["tables"]]
    body = [
        [f"`{contender}`", *(write_number(find_entry(record, name, contender)["own"]) for name in names)]
        for contender in list_contenders(record)
    ]
    return make_table(["mean AUC on a site's own rows", *(f"`{name}`" for name in names)], body)


def write_setting(setting: Mapping[str, Any]) -> str:
    """A setting as text: what differs from pooled weighting, and the learning rate."""
    words = [f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in setting.items()]
    return ", ".join(words).replace("_", " ")


def compare_defaults(record: Record, contender: str) -> str:
    """Fixed settings of one contender, the best mean first."""
    entries = sorted(
        (entry for entry in record["defaults"] if entry["contender"] == contender),
        key=lambda entry: -entry["difference"],
    )
    body = [
        [
            write_setting(entry["setting"]),
            write_number(entry["difference"], True),
            f"{write_number(entry['worst'], True)} (`{entry['worst_table']}`)",
        ]
        for entry in entries
    ]
    return make_table([f"`{contender}`", "mean over tables", "worst table"], body)


def make_blocks(record: Record) -> dict[str, str]:
    """Every generated part of docs/tables.md by name."""
    blocks = {
        "tables": describe_tables(record),
        "sources": list_sources(record),
        "comparison": compare_contenders(record),
        "differences": compare_with_central(record),
        "own rows": compare_own_rows(record),
    }
    for contender in dict.fromkeys(entry["contender"] for entry in record["defaults"]):
        blocks[f"defaults of {contender}"] = compare_defaults(record, contender)
    return blocks


def main() -> None:
    """Write the record, or print its Markdown."""
    source = Path(sys.argv[1])
    if len(sys.argv) == 2:
        for name, block in make_blocks(json.loads(source.read_text())).items():
            print(f"## {name}\n\n{block}\n")
        return
    from harness.report import describe_hardware
    from public_tables import TABLES, describe_table

    rows = [json.loads(line) for line in source.read_text().splitlines()]
    used = [table for name, table in TABLES.items() if any(row["table"] == name for row in rows)]
    record = {
        "about": {"splits": sorted({row["seed"] for row in rows}), "trainings": len(rows), **describe_hardware()},
        "tables": [describe_table(table) for table in used],
        "comparison": summarise_comparison(rows),
        "defaults": summarise_defaults(rows),
    }
    Path(sys.argv[2]).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
