"""A server and a site whose message formats differ refuse each other before the first round; releases may differ."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cli_helpers import fedauc
from fedauc.federation import versions
from fedauc.federation.registration import CENSUS_FILE
from fedauc.federation.serialization import Payload
from fedauc.federation.server import summarize_run, write_failure
from fedauc.federation.site import Site
from fedauc.federation.site_control import open_controlled_site
from fedauc.federation.site_data import SiteData
from fedauc.federation.versions import MESSAGE_FORMAT, find_version_problem
from fedauc.guards import TrainingStopped
from fedauc.version import VERSION
from federation.memory_grid import MemoryGrid, create_run, make_agreement, make_grid, resume_run
from small_federations import held_out

STOPPING = {"on_site_failure": "stop", "evaluation": "none"}
CONTINUING = {"evaluation": "none"}
"""One of the small federation's sites has no rows, so that its runs continue without a site that fails."""

EMPTY = np.zeros(0, np.uint8)


def change_version(site: Site, monkeypatch: pytest.MonkeyPatch, number: int, release: str) -> None:
    """Let a site read and write messages as if it had another version installed."""
    answer_message = site.answer_message

    def answer(payload: Payload) -> Payload:
        with monkeypatch.context() as patched:
            patched.setattr(versions, "MESSAGE_FORMAT", number)
            patched.setattr(versions, "VERSION", release)
            return answer_message(payload)

    site.answer_message = answer  # type: ignore[method-assign]


def forget_version(site: Site) -> None:
    """Let a site answer as one from before messages said their format: it reads anything, and states nothing."""
    answer_message = site.answer_message

    def answer(payload: Payload) -> Payload:
        reply = answer_message(payload)
        header = {key: value for key, value in reply.read_header().items() if key not in ("message_format", "fedauc")}
        return Payload(json.dumps(header), reply.body)

    site.answer_message = answer  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "release", "number", "outdated"),
    [
        (MESSAGE_FORMAT + 1, "0.9.0", MESSAGE_FORMAT + 1, "the server"),
        (MESSAGE_FORMAT - 1, "0.2.5", MESSAGE_FORMAT - 1, "the site"),
        (None, "", 1, "the site"),
    ],
)
def test_another_format_is_refused_on_both_sides_before_the_first_round(
    change: int | None,
    release: str,
    number: int,
    outdated: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    grid, out = make_grid(tmp_path / "sites"), tmp_path / "run"
    if change is None:
        forget_version(grid.sites["site-0"])
    else:
        change_version(grid.sites["site-0"], monkeypatch, change, release)
    with caplog.at_level(logging.WARNING), pytest.raises(TrainingStopped) as stopped:
        create_run(make_agreement("cycp-fedavg", STOPPING), grid, out)
    shown = f"fedauc {release}" if release else "an earlier fedauc"
    expected = f"the site runs {shown} (messages of format {number}); the server runs fedauc {VERSION} (format "
    assert str(stopped.value).startswith(f"site 'site-0': {expected}{MESSAGE_FORMAT}): upgrade fedauc at {outdated} ")
    assert "\n" not in str(stopped.value)
    logged = [(record.name, record.getMessage()) for record in caplog.records]
    assert any(name == "fedauc.server" and expected in message for name, message in logged)
    if change is not None:
        ours = (
            f"the server runs fedauc {VERSION} (messages of format {MESSAGE_FORMAT}); this site runs fedauc {release}"
        )
        assert any(name == "fedauc.site" and message.startswith(ours) for name, message in logged)
    # The others were asked once, and nobody was asked for a visit.
    assert {header["kind"] for _, header in grid.sent_headers} == {"register"}
    write_failure(out, stopped.value)
    done = fedauc(capsys, "federation", "show", str(out))
    assert done.code == 3
    assert expected in done.err


def test_a_site_under_its_owners_control_refuses_and_logs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The refusal comes before the plan is looked at, which a newer server may write in another way."""

    def load_nothing() -> SiteData:
        pytest.fail("no row is read for a message that cannot be read")

    site = open_controlled_site({"state": str(tmp_path)}, load_nothing)
    message = Payload(
        json.dumps({"kind": "register", "run": "r1", "plan": 3, "message_format": 9, "fedauc": "9.1"}), EMPTY
    )
    with caplog.at_level(logging.WARNING):
        answer = site.answer_message(message).read_header()
    reason = f"the server runs fedauc 9.1 (messages of format 9); this site runs fedauc {VERSION}"
    assert answer["kind"] == "refusal"
    assert answer["reason"].startswith(reason)
    assert answer["reason"].endswith("upgrade fedauc at this site")
    assert caplog.records[0].getMessage() == answer["reason"]
    assert answer["reason"] in (tmp_path / "audit.jsonl").read_text()


def test_a_run_may_begin_without_an_outdated_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = make_grid(tmp_path / "sites")
    change_version(grid.sites["site-3"], monkeypatch, MESSAGE_FORMAT - 1, "0.2.5")
    result = create_run(make_agreement("cycp-fedavg", CONTINUING), grid, tmp_path / "run").train_to_end()
    assert result["attendance"]["site-3"]["answered"] == 0
    assert result["attendance"]["site-4"]["answered"] > 0


def test_releases_with_one_format_work_together_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(name: str, prepare: Callable[[MemoryGrid], None] = lambda grid: None) -> bytes:
        grid = make_grid(tmp_path / name / "sites", test=held_out())
        prepare(grid)
        create_run(
            make_agreement("scaffold", CONTINUING, participation="cyclic"), grid, tmp_path / name / "run"
        ).train_to_end()
        return (tmp_path / name / "run" / "model.npz").read_bytes()

    mixed = train("mixed", lambda grid: change_version(grid.sites["site-3"], monkeypatch, MESSAGE_FORMAT, "0.3.7"))
    assert mixed == train("equal")


def test_a_site_that_is_upgraded_in_mid_run_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on without it, as without any site that fails in a round; its reason is in the attendance."""
    grid, out = make_grid(tmp_path / "sites"), tmp_path / "run"
    agreement = make_agreement("cycp-fedavg", CONTINUING)
    create_run(agreement, grid, out)
    change_version(grid.sites["site-3"], monkeypatch, MESSAGE_FORMAT + 1, "0.9.0")
    resume_run(agreement, grid, out).train_to_end()
    assert summarize_run(out)["attendance"]["site-3"] == {"answered": 0, "absent": 0, "refused": 2}
    assert "upgrade fedauc at the server" in (out / "attendance.jsonl").read_text()


def test_a_run_of_another_format_is_not_resumed(tmp_path: Path) -> None:
    grid, out = make_grid(tmp_path / "sites"), tmp_path / "run"
    agreement = make_agreement("cycp-fedavg", CONTINUING)
    create_run(agreement, grid, out)
    census = json.loads((out / CENSUS_FILE).read_text())
    assert census["message_format"] == MESSAGE_FORMAT
    (out / CENSUS_FILE).write_text(json.dumps({**census, "fedauc": "0.2.0", "message_format": 1}))
    problem = rf"began with fedauc 0\.2\.0 \(messages of format 1\); this is fedauc {VERSION} .*: finish the run with"
    with pytest.raises(ValueError, match=problem):
        resume_run(agreement, grid, out)
    # A finished run needs no message that could be misread.
    (out / CENSUS_FILE).write_text(json.dumps(census))
    resume_run(agreement, grid, out).train_to_end()
    (out / CENSUS_FILE).write_text(json.dumps({**census, "message_format": 1}))
    assert resume_run(agreement, grid, out).train_to_end()["final"]


@pytest.mark.parametrize("value", ["2", None, 2.0, [2]])
def test_a_format_that_is_no_number_counts_as_the_first(value: object) -> None:
    assert "messages of format 1" in find_version_problem({"message_format": value}, "the site", "the server")


COMMON = {"fedauc", "kind", "layouts", "message_format", "run"}
VISIT = {"class_totals", "client", "cycle_length", "model", "recipe"}

SENT_FIELDS = {
    "register": COMMON | {"hides_counts", "plan", "secure_sum", "site"},
    "visit": COMMON | VISIT | {"anchor", "last_accepted_round", "phase"},
    "evaluate": COMMON | (VISIT - {"client"}) | {"requested", "round"},
    "deliver": COMMON | (VISIT - {"client"}) | {"federation_auc", "plan", "round", "sha256", "site"},
}

RECIPE_FIELDS = {
    *(
        "algorithm",
        "augment",
        "cycles",
        "delta",
        "device",
        "dtype",
        "ema_decay",
        "engine",
        "epsilon",
        "evaluated_model",
    ),
    *("keep", "learning_rate", "local_steps", "mean", "method", "negatives", "noise_source", "participation"),
    *("patience", "positives", "precision", "private_evaluation", "seed", "server_optimizer", "stage_output", "stages"),
    *("stop_at_epsilon", "transforms", "weighting", "wrappers"),
}


def test_the_fields_of_messages_belong_to_their_format(tmp_path: Path) -> None:
    """Whoever changes what the server sends raises MESSAGE_FORMAT if a site of the version before cannot read it.

    A site refuses a recipe with a setting that it does not know, so that a new setting is such a change.
    """
    grid = make_grid(tmp_path / "sites", test=held_out())
    create_run(make_agreement("cycp-pairwise", {"evaluation": "histograms"}), grid, tmp_path / "run").train_to_end()
    sent = {header["kind"]: set(header) for _, header in grid.sent_headers}
    remedy = "raise MESSAGE_FORMAT in federation/versions.py, unless it has been raised since the last release"
    assert (MESSAGE_FORMAT, sent) == (2, SENT_FIELDS), remedy
    recipe = next(header["recipe"] for _, header in grid.sent_headers if header["kind"] == "visit")
    assert (MESSAGE_FORMAT, set(recipe)) == (2, RECIPE_FIELDS), remedy
