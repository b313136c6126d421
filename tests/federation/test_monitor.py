"""A run as its folder shows it, and the commands that need no Flower."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cli_helpers import fedauc
from fedauc.cli.federation import print_progress
from fedauc.federation.agreement import read_sites
from fedauc.federation.local_federation import write_demo_sites
from fedauc.federation.server import summarize_run
from federation.memory_grid import Fault, create_run, make_agreement, make_grid
from small_federations import held_out


def finish_run(folder: Path) -> Path:
    agreement = make_agreement("cycp-pairwise", {"evaluation": "histograms"})
    grid = make_grid(folder / "sites", [Fault(site=6, round=2, kind="nan", times=9)], held_out())
    create_run(agreement, grid, folder / "run").train_to_end()
    return folder / "run"


def test_a_run_is_summarized_in_a_few_numbers(tmp_path: Path) -> None:
    summary = summarize_run(finish_run(tmp_path))
    assert (summary["status"], summary["done"], summary["rounds"]) == ("done", 9, 9)
    assert summary["attendance"]["site-6"] == {"answered": 2, "absent": 0, "refused": 1}
    with pytest.raises(ValueError, match=r"has no census\.json"):
        summarize_run(tmp_path)


def test_progress_lines_name_who_answered_and_who_did_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run is over when it is first looked at, so nothing is new; seen from its start, every line is."""
    run = finish_run(tmp_path)
    moved = tmp_path / "moved"
    steps = iter([True, False])

    def is_alive() -> bool:
        if not run.exists():
            return next(steps)
        run.rename(moved)
        return True

    print_progress(moved, is_alive)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "round 1 of 9: site-0, site-1"
    assert lines[2] == "round 3 of 9: site-5, site-7; site-6 missing: 4 of its values are NaN or infinite"
    assert lines[-1].startswith("round 9: AUC 0.")
    assert len(lines) == 11
    # The refused scores: two local steps of two positives each.


def test_the_demo_is_partitioned_by_the_hour_without_loss(tmp_path: Path) -> None:
    """28,930 transactions, 492 of them frauds, over three sites."""
    names = ["a", "b", "c"]
    write_demo_sites(tmp_path, names)
    labels = [np.load(tmp_path / name / "rows" / f"{part}y.npy") for name in names for part in ("", "test_")]
    assert sum(map(len, labels)) == 28_930
    assert sum(int(part.sum()) for part in labels) == 492
    assert min(map(len, labels)) > 1000


def test_a_table_of_sites_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "sites.toml"
    path.write_text('[south]\ngroup = "b"\n[north]\ngroup = "a"\nkey = "k"\n')
    assert [(site.name, site.group, site.key) for site in read_sites(path)] == [("north", "a", "k"), ("south", "b", "")]
    path.write_text('[north]\nteam = "a"\n')
    with pytest.raises(ValueError, match=r"site 'north' is \{'team': 'a'\}; it must be a section with"):
        read_sites(path)
    path.write_text("[north\n")
    with pytest.raises(ValueError, match="is not TOML"):
        read_sites(path)
    with pytest.raises(ValueError, match="no such file"):
        read_sites(tmp_path / "none.toml")


def test_the_commands_say_in_one_line_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["federation", "show", str(tmp_path)],
        ["federation", "resume", str(tmp_path)],
        ["federation", "init", str(tmp_path / "app"), "--sites", ","],
        ["federation", "local", "--sites", "2", "--groups", "3", "--out", str(tmp_path / "t")],
    ):
        done = fedauc(capsys, *arguments)
        assert done.code == 2
        assert done.err.startswith("error: ")
        assert done.err.count("\n") == 1


def test_init_refuses_a_site_without_a_group_where_others_have_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = fedauc(capsys, "federation", "init", str(tmp_path / "app"), "--sites", "north=day,south")
    problem = "error: site 'south' has no group, but others have one: give every site a group, or none\n"
    assert done == (2, "", problem)
    assert not (tmp_path / "app").exists()


def test_a_local_trial_of_two_sites_has_two_groups_unless_told_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder exists, so that the command ends behind the check of its groups."""
    done = fedauc(capsys, "federation", "local", "--sites", "2", "--out", str(tmp_path))
    assert done.code == 2
    assert "groups" not in done.err


def test_show_prints_attendance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish_run(tmp_path)
    done = fedauc(capsys, "federation", "show", str(tmp_path))
    assert done.code == 0
    assert "done, 9 of 9 rounds: 2 cycles of 3, after one that collects scores\n" in done.out
    assert "site-6: answered 2, absent 0, refused 1" in done.out
