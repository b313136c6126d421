"""docs/results.md is computed a second time from the records, by code that shares nothing with the first.

`test_the_page_of_results_is_what_the_records_say` compares the page with `python -m paper report`, and so cannot find
an error of that command. `tests/recomputation` reads the same files with JSON, numpy and scipy alone.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from recomputation.differences import rank_shares
from recomputation.page import Page
from recomputation.records import Records, Run, Specs
from recomputation.sentences import FIXED_TABLES, FIXED_TEXTS, Expectation

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text()


@pytest.fixture(scope="module")
def specs() -> Specs:
    return Specs.read(ROOT / "paper")


@pytest.fixture(scope="module")
def records() -> Records:
    return Records(ROOT / "paper" / "records")


@pytest.fixture(scope="module")
def expectation(records: Records, specs: Specs) -> Expectation:
    return Expectation(Page(records, specs), specs)


def test_nothing_of_the_library_or_of_the_reproduction_is_used() -> None:
    sources = [path.read_text() for path in (ROOT / "tests" / "recomputation").glob("*.py")]
    imported = {name for text in sources for name in re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)}
    assert not imported & {"fedauc", "paper", "paper_records"}


def test_every_number_of_the_page_follows_from_the_records(expectation: Expectation) -> None:
    assert expectation.find_disagreements(PAGE) == []
    assert sum(len(table) * len(table[0]) for table in expectation.tables) > 1500
    assert [text for text in FIXED_TEXTS if text not in PAGE] == []


def test_the_auc_of_a_record_is_that_of_its_ranks(records: Records) -> None:
    """Exactly where every test example is stored; otherwise the negatives are a sample, and DeLong bounds its error."""
    counts = {"all": 0, "sample": 0}
    for run in records.runs.values():
        if (stored := records.find_ranks(run)) is None:
            continue
        labels, ranks = stored
        shares = rank_shares(labels, ranks)
        # A tested part of 22,500 rows was filled with a sample of the negatives.
        sampled = len(labels) == 22_500
        error = np.std(shares.negatives) / np.sqrt(len(shares.negatives)) if sampled else 0.0
        assert run.line["auc"] == pytest.approx(shares.auc, abs=1e-9 + 5 * error), run.name
        counts["sample" if sampled else "all"] += 1
    assert min(counts.values()) > 50


def test_a_changed_digit_of_the_page_is_found(expectation: Expectation) -> None:
    """One digit in every third line that has one, except in file names and in the tables that explain names."""
    lines, fixed, changed = PAGE.splitlines(), False, 0
    for number, line in enumerate(lines):
        if line.startswith("|") and not lines[number - 1].startswith("|"):
            fixed = [cell.strip() for cell in line.strip("|").split("|")] in FIXED_TABLES
        digits = [match.start() for match in re.finditer(r"\d", line)]
        if not digits or line.startswith("![") or (fixed and line.startswith("|")) or number % 3:
            continue
        position = digits[number % len(digits)]
        other = str((int(line[position]) + 1) % 10)
        lines[number] = line[:position] + other + line[position + 1 :]
        assert expectation.find_disagreements("\n".join(lines)), f"nobody sees {lines[number]!r}"
        lines[number], changed = line, changed + 1
    assert changed > 100


def test_a_changed_record_is_found(tmp_path: Path, records: Records, specs: Specs) -> None:
    """A copy with one digit of an AUC changed, the bytes of one curve, and the order of one run's test scores."""
    copy = tmp_path / "records"
    shutil.copytree(ROOT / "paper" / "records", copy)
    table1 = Page(records, specs).shown["table1"]
    first, second = (table1.cells["cycp-pairwise", column].runs for column in ("cifar10", "insurance-synthetic"))
    reranked = table1.cells["a-fedavg", "cifar100"].runs[0]
    wrong = round(first[0].line["auc"] - 0.01, 6)
    _replace_in_record(copy / "cifar10.jsonl", first[0], f'"auc":{first[0].line["auc"]}', f'"auc":{wrong}')
    point = second[1].line["curve"][0]
    start = ",".join(map(str, point[:2]))
    _replace_in_record(copy / "medicare-like.jsonl", second[1], f"[{start},{point[2]}", f"[{start},{point[2] * 2}")
    changed = Records(copy)
    labels, ranks = records.find_ranks(reranked) or (None, None)
    assert labels is not None
    assert ranks is not None
    changed.replace_ranks(reranked, labels, ranks[::-1])
    problems = "\n".join(Expectation(Page(changed, specs), specs).find_disagreements(PAGE))
    assert "the page has ['cycp-pairwise', '.9174 ± .0038~ [.8480]', " in problems
    assert "the page has ['cycp-pairwise', '≤ 110 (0.16), 2.29 MB', " in problems
    assert "the page has ['cifar100: cycp-minimax', " in problems


def _replace_in_record(path: Path, run: Run, old: str, new: str) -> None:
    """Change the line of one run in a file of records."""
    lines = path.read_text().splitlines(keepends=True)
    position = next(number for number, line in enumerate(lines) if f'"auc":{run.line["auc"]},' in line)
    assert old in lines[position]
    lines[position] = lines[position].replace(old, new, 1)
    path.write_text("".join(lines))
