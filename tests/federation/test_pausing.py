"""The operator pauses a run between rounds, and resumes it to the same model."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_helpers import fedauc
from fedauc.cli.federation import pause, show
from fedauc.federation.pausing import REQUEST_FILE, request_pause
from fedauc.guards import TrainingStopped
from fedauc.training import Round
from federation.memory_grid import collect_rounds, create_run, make_agreement, make_grid, resume_run
from small_federations import run_rounds, same_bits, small_recipe


@pytest.mark.parametrize(("at_cycle_end", "done"), [(False, 2), (True, 3)])
def test_a_paused_run_stops_after_the_round_or_the_cycle_and_goes_on(
    at_cycle_end: bool, done: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked during round 1, the second of a cycle of three; the model is that of a run without a pause."""
    agreement, out = make_agreement("cycp-pairwise", {"evaluation": "none"}), tmp_path / "app" / "run"
    grid = make_grid(tmp_path / "sites")
    run = create_run(agreement, grid, out)
    rounds: list[Round] = []
    answer = grid.sites["site-3"].answer_message

    def ask_for_a_pause(payload: object) -> object:
        pause(tmp_path / "app", at_cycle_end)
        grid.sites["site-3"].answer_message = answer  # type: ignore[method-assign]
        return answer(payload)  # type: ignore[arg-type]

    grid.sites["site-3"].answer_message = ask_for_a_pause  # type: ignore[method-assign, assignment]
    status = f"paused by the operator after {done} of 9 rounds; resume the run to go on"
    with pytest.raises(TrainingStopped, match=status):
        collect_rounds(run, rounds)
    assert [finished.phase.round for finished in rounds] == list(range(done))
    assert (out / "stopped.txt").read_text() == f"{status}\n"
    assert fedauc(capsys, "federation", "pause", str(tmp_path / "app")) == (
        2,
        "",
        f"error: the run in {out} is already {status}\n",
    )
    show(tmp_path / "app")
    assert capsys.readouterr().out.startswith(f"{status}, {done} of 9 rounds: 2 cycles of 3, after one that")

    collect_rounds(resume_run(agreement, grid, out), rounds)
    assert [finished.phase.round for finished in rounds] == list(range(9))
    expected = run_rounds(small_recipe("cycp-pairwise", engine="loop"))
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)
    assert not (out / "stopped.txt").exists()
    assert not (out / REQUEST_FILE).exists()


def test_a_request_after_the_last_round_began_does_not_keep_a_run_from_its_end(tmp_path: Path) -> None:
    agreement, out = make_agreement("cycp-fedavg", {"evaluation": "none"}, cycles=1), tmp_path / "run"
    run = create_run(agreement, make_grid(tmp_path / "sites"), out)

    def ask_in_the_last_round(finished: Round) -> None:
        if finished.phase.round == 2:
            request_pause(out)

    assert "final" in collect_rounds(run, [], ask_in_the_last_round)
    with pytest.raises(ValueError, match=r"is done; there is nothing to pause"):
        request_pause(out)


def test_a_run_that_has_stopped_is_not_asked_to_pause(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = create_run(make_agreement("cycp-fedavg", {"evaluation": "none"}), make_grid(tmp_path / "sites"), out)
    run.folder.write_stop_reason("round 2: 3 rounds in a row were skipped")
    with pytest.raises(ValueError, match=r"has already stopped: round 2: 3 rounds in a row were skipped$"):
        request_pause(out)


def test_a_damaged_request_pauses_at_once(tmp_path: Path) -> None:
    agreement, out = make_agreement("cycp-fedavg", {"evaluation": "none"}), tmp_path / "run"
    run = create_run(agreement, make_grid(tmp_path / "sites"), out)

    def write_damaged_request(finished: Round) -> None:
        (out / REQUEST_FILE).write_text("{")

    with pytest.raises(TrainingStopped, match="after 1 of 6 rounds"):
        collect_rounds(run, [], write_damaged_request)


def test_only_a_federated_run_can_be_paused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no federated run: it has no federation\.json"):
        pause(tmp_path)
