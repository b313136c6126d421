"""The table of docs/choosing.md about uneven sites has the numbers of its record."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
METHODS = ("cycp-fedavg", "cycp-fedavg-balanced", "cycp-minimax", "cycp-pairwise", "a-scaffold")


def test_the_table_of_uneven_sites_is_that_of_the_record() -> None:
    """Mean AUC with `pooled` less that with `clients`, to three digits; a run that diverged has none."""
    rows = json.loads((ROOT / "benchmarks" / "records" / "uneven-sites.json").read_text())["rows"]
    values = {(row["model"], row["times"], row["method"], row["weighting"]): row["auc"] for row in rows}
    page = (ROOT / "docs" / "choosing.md").read_text()
    for model in ("linear", "hidden layer"):
        for times in (9, 51, 91):
            (line,) = [line for line in page.splitlines() if line.startswith(f"| {times} times, {model} |")]
            cells = [cell.strip() for cell in line.strip("|").split("|")[1:]]
            for method, cell in zip(METHODS, cells, strict=True):
                pooled, clients = (values[model, times, method, weighting] for weighting in ("pooled", "clients"))
                if None in pooled:
                    assert cell == "diverges"
                    continue
                difference = sum(pooled) / len(pooled) - sum(clients) / len(clients)
                assert abs(float(cell) - difference) <= 0.0005 + 1e-9, (model, times, method)
