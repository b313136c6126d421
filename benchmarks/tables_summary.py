"""From the trainings of `tables.py` to a record, and from the record to the tables of docs/tables.md.

    python benchmarks/tables_summary.py benchmarks/out/tables.jsonl benchmarks/records/tables.json  # the record
    python benchmarks/tables_summary.py benchmarks/records/tables.json docs/tables.md                 # the page

Numbers are means over the splits of a table, with the smallest and the largest. Splits share rows, so these show how
much a number depends on the split, not what would happen on other data.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

CENTRAL, BOOSTING = "central-logistic", "central-boosting"
Row = Mapping[str, Any]
Record = dict[str, Any]


def compute_range(values: Sequence[float]) -> dict[str, float]:
    """Mean, smallest and largest value over splits."""
    return {"mean": mean(values), "low": min(values), "high": max(values)}


def choose_settings(rows: Iterable[Row]) -> dict[tuple[str, str], dict[int, Row]]:
    """By table and contender: for every split the training with the highest validation AUC, among tuned settings."""
    best: dict[tuple[str, str], dict[int, Row]] = defaultdict(dict)
    for row in rows:
        splits = best[row["table"], row["contender"]]
        if row["tuned"] and row["validation"] > splits.get(row["seed"], {"validation": -1})["validation"]:
            splits[row["seed"]] = row
    return best


def drop_unfinished_splits(rows: Sequence[Row]) -> list[Row]:
    """The rows of those splits of a table on which every contender has run with all its tuned settings."""
    counts = Counter((row["table"], row["seed"]) for row in rows if row["tuned"])
    return [row for row in rows if counts[row["table"], row["seed"]] == max(counts.values())]


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
                "auc": compute_range([splits[seed]["test"] for seed in seeds]),
                "difference": compute_range([splits[seed]["test"] - central[seed]["test"] for seed in seeds]),
                "own": mean(splits[seed]["own"] for seed in seeds),
                "setting": json.loads(settings.most_common(1)[0][0]),
                "splits": len(seeds),
            }
        )
    return entries


def summarise_settings(rows: Sequence[Row]) -> list[Record]:
    """For every fixed setting: the difference to central logistic regression, over tables, and on the worst table."""
    best = choose_settings(rows)
    differences: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    stopped: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows:
        if "/" in row["contender"] and row["seed"] in best[row["table"], CENTRAL]:
            reference = best[row["table"], CENTRAL][row["seed"]]["test"]
            key = (row["contender"], json.dumps(row["setting"]))
            differences[key][row["table"]].append(row["test"] - reference)
            stopped[key] |= {row["table"]} if row.get("stopped") else set()
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
                "stopped": sorted(stopped[contender, setting]),
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
    """Central models, models of single sites, and federated ones by model; those that have run on every table."""
    counts = Counter(entry["contender"] for entry in record["comparison"])
    complete = [contender for contender, count in counts.items() if count == len(record["tables"])]
    kinds = ("central-logistic", "central-", "sites-", "/linear", "/mlp", "/tabular")
    return sorted(complete, key=lambda name: (next(kinds.index(kind) for kind in kinds if kind in name), name))


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
            write_number(entry["auc"]["mean"]) + (" \\*" if entry["auc"]["mean"] == best[entry["table"]] else "")
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
            cells = [", ".join(write_number(span[key], True) for key in ("low", "mean", "high")) for span in spans]
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


DEFAULT_RATES = {"cycp-fedavg": 0.1, "cycp-minimax": 0.01, "cycp-pairwise": 0.1}
"""Learning rates that the methods have by default."""


def write_setting(setting: Mapping[str, Any]) -> str:
    """What a setting changes, besides the learning rate and pooled weighting."""
    changes = {name: value for name, value in setting.items() if name not in ("learning_rate", "weighting")}
    words = [f"{name.replace('_', ' ')} {value}" for name, value in changes.items()]
    return ", ".join(words) or f"weighting {setting['weighting']}"


def write_difference(entries: Sequence[Record]) -> str:
    """The mean over tables and the worst table of the only entry; a dash if there is none."""
    if not entries:
        return "-"
    entry = entries[0]
    diverges = " diverges" if entry["worst_table"] in entry["stopped"] else ""
    average, worst = (write_number(entry[name], True) for name in ("difference", "worst"))
    return f"{average} ({worst} `{entry['worst_table']}`{diverges})"


def compare_settings(record: Record, model: str) -> str:
    """What each change does at the methods' default learning rates: the difference to central logistic regression."""
    names = {method: f"{method}/{model}" for method in DEFAULT_RATES}
    settings = dict.fromkeys(
        write_setting(entry["setting"]) for entry in record["settings"] if entry["contender"] in names.values()
    )
    rows = []
    for text in sorted(settings, key=lambda text: (not text.startswith("weighting"), text)):
        cells = [
            write_difference(
                [
                    entry
                    for entry in record["settings"]
                    if entry["contender"] == names[method]
                    and entry["setting"]["learning_rate"] == rate
                    and write_setting(entry["setting"]) == text
                ]
            )
            for method, rate in DEFAULT_RATES.items()
        ]
        rows.append([text, *cells])
    return make_table(
        ["", *(f"`{method}`, {write_number(rate)[:4].rstrip('0')}" for method, rate in DEFAULT_RATES.items())], rows
    )


def compare_rates(record: Record) -> str:
    """Learning rates with pooled weighting: the difference to central logistic regression."""
    entries = [entry for entry in record["learning_rates"] if write_setting(entry["setting"]) == "weighting pooled"]
    rates = sorted({entry["setting"]["learning_rate"] for entry in entries})
    contenders = [name for name in list_contenders(record) if "/" in name]
    body = [
        [
            f"`{name}`",
            *(
                write_difference(
                    [e for e in entries if (e["contender"], e["setting"]["learning_rate"]) == (name, rate)]
                )
                for rate in rates
            ),
        ]
        for name in contenders
    ]
    return make_table(["learning rate", *(f"{rate:g}" for rate in rates)], body)


def count_goals(record: Record) -> str:
    """For every federated contender: its worst difference to central logistic regression and to per-site models."""
    names, body = [table["name"] for table in record["tables"]], []
    for contender in (name for name in list_contenders(record) if "/" in name):
        entries = {name: find_entry(record, name, contender) for name in names}
        worst = min(names, key=lambda name: entries[name]["difference"]["mean"])
        alone = {
            name: max(find_entry(record, name, kind)["auc"]["mean"] for kind in ("sites-logistic", "sites-boosting"))
            for name in names
        }
        gains = {name: entries[name]["auc"]["mean"] - alone[name] for name in names}
        least = min(names, key=gains.__getitem__)
        boosting = [entries[name]["auc"]["mean"] - find_entry(record, name, BOOSTING)["auc"]["mean"] for name in names]
        body.append(
            [
                f"`{contender}`",
                f"{write_number(entries[worst]['difference']['mean'], True)} (`{worst}`)",
                f"{write_number(gains[least], True)} (`{least}`)",
                f"{sum(value > -0.01 for value in boosting)} of {len(names)}",
            ]
        )
    head = [
        "",
        "worst against central logistic",
        "least gain over the mean site",
        "tables within .01 of central boosting, or above",
    ]
    return make_table(head, body)


def make_blocks(record: Record) -> dict[str, str]:
    """Every generated part of docs/tables.md by name."""
    return {
        "tables": describe_tables(record),
        "sources": list_sources(record),
        "goals": count_goals(record),
        "comparison": compare_contenders(record),
        "differences": compare_with_central(record),
        "own rows": compare_own_rows(record),
        "settings": compare_settings(record, "linear"),
        "learning rates": compare_rates(record),
    }


def update_page(text: str, record: Record) -> str:
    """The page with the generated parts between its markers replaced by those of the record."""
    for name, block in make_blocks(record).items():
        pattern = rf"<!-- begin {re.escape(name)} -->\n.*?<!-- end -->"
        before, after = f"<!-- begin {name} -->\n", "<!-- end -->"
        text = re.sub(pattern, lambda _, part=f"{before}\n{block}\n\n{after}": part, text, flags=re.DOTALL)
    return text


def write_record(trainings: Path, record_file: Path) -> None:
    """Summarise the trainings on the splits that are complete."""
    from public_tables import TABLES, describe_table

    rows = drop_unfinished_splits([json.loads(line) for line in trainings.read_text().splitlines()])
    # Settings are compared on the same splits: those on which all of them have run.
    studied = {row["seed"] for row in rows if not row["tuned"]}
    used = [table for name, table in TABLES.items() if any(row["table"] == name for row in rows)]
    record = {
        "about": {
            "splits": sorted({row["seed"] for row in rows}),
            "splits_of_settings": sorted(studied),
            "trainings": len(rows),
        },
        "tables": [describe_table(table) for table in used],
        "comparison": summarise_comparison(rows),
        "settings": summarise_settings([row for row in rows if row["seed"] in studied]),
        "learning_rates": summarise_settings([row for row in rows if row["tuned"]]),
    }
    record_file.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    """Write the record, or the page."""
    source, target = map(Path, sys.argv[1:3])
    if target.suffix == ".json":
        write_record(source, target)
    else:
        target.write_text(update_page(target.read_text(), json.loads(source.read_text())))


if __name__ == "__main__":
    main()
