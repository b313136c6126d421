"""The commands of paper/README.md: their options exist, and the example of an additional row runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cli_helpers import paper_command
from paper.records import RecordStore
from paper.scales import PAPER, SMOKE
from paper.table_specs import Row, build_tables

README = (Path(__file__).parents[2] / "paper" / "README.md").read_text()
COMMANDS = [shlex.split(line, comments=True)[3:] for line in re.findall(r"^python -m paper .*", README, re.MULTILINE)]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_of_the_readme_has_the_options_it_names(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    told = paper_command(capsys, words[0], "--help")
    assert told.code == 0
    options = [word for word in words if word.startswith("--")]
    assert [option for option in options if option not in told.out] == []


def test_the_readmes_row_is_run_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (words,) = [words for words in COMMANDS if "--row" in words]
    monkeypatch.chdir(tmp_path)
    told = paper_command(capsys, *words, "--seeds", "0", "--tuning", "none")
    assert told.code == 0, told.err
    assert re.search(r"^square +\.\d{4}", told.out, re.MULTILINE)
    shown = paper_command(capsys, "show", *words, "--seeds", "0")
    assert re.search(r"^square +\.\d{4}", shown.out, re.MULTILINE)
    assert RecordStore(tmp_path / "paper" / "records").has_runs("synthetic", "cycp-pairwise")


def test_a_row_is_read_from_text() -> None:
    assert Row.parse("mine=fedavg") == Row("mine", "fedavg")
    assert Row.parse("mine=fedavg,local-steps=3").settings == {"local-steps": "3"}
    for text in ("mine", "=fedavg", "mine=", "mine=fedavg,local-steps"):
        with pytest.raises(ValueError, match=f"row is '{text}'; it must be name=method and options, such as"):
            Row.parse(text)
    with pytest.raises(ValueError, match="unknown method 'fedav': did you mean 'fedavg'"):
        Row.parse("mine=fedav")


def test_a_row_needs_a_name_of_its_own() -> None:
    """The choice of a tuned row is found by its name."""
    with pytest.raises(ValueError, match="table1 already has a row 'cycp-minimax'; give yours another name"):
        build_tables(PAPER)["table1"].add_rows([Row("cycp-minimax", "cycp-minimax", {"learning-rate": "0.5"})])
    table = build_tables(SMOKE)["table1"].add_rows([Row("mine", "fedavg")])
    assert [row.name for row in table.rows][-2:] == ["cycp-pairwise", "mine"]
