"""Sites hold out validation rows: the federation stops early and keeps its best model as a simulation does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from cli_helpers import fedauc
from fedauc.cli.federation import describe_summary
from fedauc.data.clients import Clients, Examples
from fedauc.experiments.callbacks.early_stopping import EarlyStopping
from fedauc.experiments.fitting import Fitted, fit
from fedauc.experiments.folder import RunFolder
from fedauc.federation.agreement import FederationAgreement
from fedauc.federation.delivery import hash_tensors, verify_model
from fedauc.federation.evaluation import SCORE_BINS
from fedauc.federation.run_config import read_run_config
from fedauc.federation.run_plan import check_against_plan, describe_plan, hash_plan, read_plan
from fedauc.federation.serialization import Payload, pack_payload, unpack_tensors
from fedauc.federation.server import summarize_run
from fedauc.federation.site import Site, SitePolicy
from fedauc.federation.site_data import SiteData, split_rows
from fedauc.federation.site_state import SiteRefusal
from fedauc.federation.validation_gain import count_wins, measure_gain
from fedauc.guards import TrainingStopped
from fedauc.transforms.client_dp import ClientDP
from fedauc.transforms.secure_sum import SecureSum
from federation.hospital_tables import HOSPITALS, make_controlled_sites, make_hospital_agreement, start_hospital_run
from federation.memory_grid import (
    NAMES,
    MemoryGrid,
    collect_rounds,
    create_run,
    make_agreement,
    make_grid,
    make_policy,
    make_sites,
    resume_run,
)
from federation.misbehaving_sites import MisbehavingSite, Trees
from federation.test_joining_sites import LATER, resume_with, train_until_paused, without
from small_federations import EMPTY, GROUPS, held_out, linear_scorer, small_federation

FRACTION = 0.3

TIMES = 4
"""The small federation has four times its rows: site 0 holds out 4 of its 12 positives and 6 of its 20 negatives."""

SCORES = SitePolicy("scores")

CHOOSING: dict[str, Any] = {"keep": "best", "patience": 2, "cycles": 8, "engine": "loop", "learning_rate": 1.0}
"""Settings with which the runs below stop after five of eight cycles, and keep the model of the third."""

POLICY: dict[str, Any] = {"evaluation": "scores", "validation_fraction": FRACTION}


class Killed(Exception):
    """Stands for a server that is killed."""


class SplitRows(NamedTuple):
    """The small federation's rows to train on with their clients, and the validation rows of each client."""

    clients: Clients
    validation: dict[int, Examples]

    @property
    def pooled(self) -> Examples:
        """All clients' validation rows."""
        parts = self.validation.values()
        return Examples(torch.cat([part.inputs for part in parts]), torch.cat([part.labels for part in parts]))


def split_small_federation() -> SplitRows:
    """What the sites hold out, written down with the labels of every site in its own order."""
    source = small_federation(TIMES)
    train, owners, validation = [], [], {}
    for client in range(len(GROUPS)):
        rows = source.rows[source.offsets[client] : source.offsets[client + 1]]
        kept, left = (rows[part] for part in split_rows(source.labels[rows].numpy(), FRACTION, "validation"))
        train.append(kept)
        owners.append(np.full(len(kept), client))
        if len(left):
            validation[client] = Examples(source.inputs[left], source.labels[left])
    rows, numbers = np.concatenate(train), np.arange(len(GROUPS))
    labels = source.labels[rows].numpy()
    clients = Clients.from_assignment(source.inputs[rows], labels, np.concatenate(owners), numbers, np.array(GROUPS))
    return SplitRows(clients, validation)


def make_choosing_grid(folder: Path, policy: SitePolicy = SCORES) -> MemoryGrid:
    return MemoryGrid(make_sites(small_federation(TIMES), folder, held_out(), policy))


def make_choosing_agreement(
    method: str = "cycp-fedavg", policy: Mapping[str, Any] | None = None, **changes: Any
) -> FederationAgreement:
    return make_agreement(method, {**POLICY, **(policy or {})}, **{**CHOOSING, "participation": "cyclic", **changes})


def simulate_choosing(agreement: FederationAgreement) -> Fitted:
    """A simulation with the same rows for training, validation and test."""
    split = split_small_federation()
    return fit(linear_scorer(), split.clients, agreement.recipe, held_out(), split.pooled, "auc", verbose=False)


def decline(header: dict[str, Any], trees: Trees) -> None:
    """Answer as a site does that is closed just then."""
    header |= {"kind": "refusal", "reason": "this site answers mon-fri 19:00-07:00 (UTC)"}


def count_pairs(scores: np.ndarray, labels: np.ndarray) -> float:
    """The AUC as its definition says: the mean wins over all pairs, ties counted one half."""
    positives, negatives = scores[labels == 1], scores[labels == 0]
    return float(np.mean([(p > n) + (p == n) / 2 for p in positives for n in negatives]))


# ------------------------------------------------------------------------------------------- rows that are too few


def test_a_site_with_too_few_validation_rows_is_evaluated_on_its_test_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Site 0 holds out 4 of its positives for validation, and its policy asks for 5; of test rows it has enough."""
    grid = make_choosing_grid(tmp_path / "sites")
    site = grid.sites[NAMES[0]]
    assert isinstance(site, Site)
    site._policy = SCORES._replace(minimum_rows=5)
    agreement = make_choosing_agreement(keep="last", patience=None)
    run = create_run(agreement, grid, tmp_path / "run")
    run.train_to_end()
    everybody = create_run(agreement, make_choosing_grid(tmp_path / "all"), tmp_path / "everybody")
    everybody.train_to_end()
    for record, expected in zip(run.folder.read_records(), everybody.folder.read_records(), strict=True):
        assert (record["auc"], record["test_sites"]) == (expected["auc"], expected["test_sites"])
        assert record["validation_sites"] == expected["validation_sites"] - 1
        assert record["validation_positives"] == expected["validation_positives"] - 4
        assert "missing" not in record
        assert record["withheld"] == {"validation": [NAMES[0]]}
    assert "withheld" not in everybody.folder.read_records()[0]
    summary = summarize_run(tmp_path / "run")
    assert summary["quarantine"] == {}
    reason = "its policy asks for more rows of a class (rows.minimum_per_class)"
    assert f"{NAMES[0]}: no scores of its validation rows: {reason}" in describe_summary(summary)
    assert caplog.text.count(f"site '{NAMES[0]}' sends no scores of its validation rows: {reason}") == 1


# ------------------------------------------------------------------------------------------------- as in a simulation


@pytest.mark.parametrize("method", ["cycp-fedavg", "cycp-pairwise", "scaffold"])
def test_rounds_are_chosen_as_in_a_simulation_with_the_same_rows(method: str, tmp_path: Path) -> None:
    """Model, AUC of test and validation rows, the round that is kept, and when and why the run ends: the same bits."""
    agreement, grid = make_choosing_agreement(method), make_choosing_grid(tmp_path / "sites")
    run = create_run(agreement, grid, tmp_path / "run")
    result, expected = run.train_to_end(), simulate_choosing(agreement)
    assert {header.get("validation_fraction") for _, header in grid.sent_headers} == {FRACTION}
    records = run.folder.read_records()
    assert [(record["round"], record["auc"], record["validation_auc"]) for record in records] == [
        (round, quality.auc, quality.validation_auc) for round, quality in expected.history
    ]
    assert expected.stopped_early is not None
    assert (result["stopped_early"], result["kept_round"]) == (expected.stopped_early, expected.round)
    assert result["kept_round"] < records[-1]["round"]
    assert result["final"] == next(record for record in records if record["round"] == expected.round)
    with np.load(tmp_path / "run" / "model.npz") as arrays:
        for name, weights in expected.module.state_dict().items():
            assert np.array_equal(arrays[name], weights.numpy())


def test_validation_rows_count_nowhere_else(tmp_path: Path) -> None:
    """Class counts are those of the rows to train on: a third of 12 positives is held out, and none of one or two."""
    create_run(make_choosing_agreement(), make_choosing_grid(tmp_path / "sites"), tmp_path / "run")
    census, split = json.loads((tmp_path / "run" / "census.json").read_text()), split_small_federation()
    assert census["positives"] == split.clients.census.positives.tolist()
    assert census["negatives"] == split.clients.census.negatives.tolist()
    assert census["positives"][0] == 12 - round(FRACTION * 12)
    few = SiteData.from_arrays(np.zeros((6, 1)), [1, 0, 0, 0, 0, 0]).hold_out_validation(0.9)
    assert few.class_counts == (1, 1)
    assert few.validation is not None
    assert few.validation.labels.tolist() == [0, 0, 0, 0]
    assert few.as_only_client(0, 1).census.positives.tolist() == [1]


@pytest.mark.parametrize("requested", ["histograms", "scores"])
def test_the_validation_auc_is_that_of_all_pairs_of_rows(requested: str, tmp_path: Path) -> None:
    """A plain loop over pairs of validation rows, with the scores of the model that the run ends with."""
    agreement = make_choosing_agreement(policy={"evaluation": requested}, keep="last", patience=None, cycles=2)
    run = create_run(agreement, make_choosing_grid(tmp_path / "sites"), tmp_path / "run")
    final, rows = run.train_to_end()["final"], split_small_federation().pooled
    with np.load(tmp_path / "run" / "model.npz") as arrays:
        scores = rows.inputs.numpy() @ arrays["weight"][0] + arrays["bias"]
    exact = count_pairs(scores, rows.labels.numpy())
    assert final["validation_positives"] + final["validation_negatives"] == len(rows.labels)
    assert final["validation_sites"] == len(split_small_federation().validation)
    if requested == "scores":
        assert final["validation_auc"] == final["validation_auc_low"] == final["validation_auc_high"] == exact
    else:
        assert final["validation_auc_low"] <= exact <= final["validation_auc_high"]
        assert final["validation_auc"] == pytest.approx(exact, abs=0.01)


def test_killed_after_every_round_it_decides_the_same(tmp_path: Path) -> None:
    agreement = make_choosing_agreement("cycp-pairwise")
    create_run(agreement, make_choosing_grid(tmp_path / "one"), tmp_path / "alone").train_to_end()
    grid, out, kills = make_choosing_grid(tmp_path / "two"), tmp_path / "run", 0
    create_run(agreement, grid, out)

    def kill(finished: object) -> None:
        raise Killed

    while not (out / "result.json").is_file():
        kills += 1
        try:
            collect_rounds(resume_run(agreement, grid, out), [], kill)
        except Killed:
            continue
    rounds = len(RunFolder(out).read_lines("attendance.jsonl"))
    assert kills == rounds + 1
    assert rounds < 24
    for name in ("records.jsonl", "attendance.jsonl", "result.json", "model.npz"):
        assert (out / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def test_a_run_without_the_setting_sends_and_records_what_it_did(tmp_path: Path) -> None:
    grid = make_grid(tmp_path / "sites", test=held_out())
    create_run(make_agreement("cycp-fedavg", {"evaluation": "histograms"}), grid, tmp_path / "run").train_to_end()
    assert not any("validation" in field for _, header in grid.sent_headers for field in header)
    assert not any("validation" in name for _, answer in grid.answers for name in unpack_tensors(answer))
    assert not any("validation" in column for record in summarize_run(tmp_path / "run")["records"] for column in record)


# ----------------------------------------------------------------------------------------------- when sites are absent


def random_answers(rng: np.random.Generator, clients: list[int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Scores on a grid of halves, so that many are equal, and labels; a site may lack a class."""
    return {
        client: (torch.from_numpy(rng.integers(0, 9, 7 + client) / 2), torch.from_numpy(rng.integers(0, 2, 7 + client)))
        for client in clients
    }


@pytest.mark.parametrize("seed", range(5))
def test_evaluations_are_compared_over_the_sites_of_both(seed: int) -> None:
    """A plain loop over the pairs of those sites' rows; scores are their own bins, so that histograms say the same."""
    rng = np.random.default_rng(seed)
    best, now = random_answers(rng, [0, 2, 3, 5]), random_answers(rng, [2, 3, 4, 5, 6])
    gain = measure_gain(count_wins(now), count_wins(best))

    def pool(answers: dict[int, Any]) -> float:
        parts = [answers[client] for client in (2, 3, 5)]
        return count_pairs(*(np.concatenate([part[side].numpy() for part in parts]) for side in (0, 1)))

    def bin_scores(answers: dict[int, Any]) -> dict[int, Any]:
        return {
            client: (
                torch.stack([torch.bincount((2 * s[y == label]).long(), minlength=SCORE_BINS) for label in (0, 1)]),
            )
            for client, (s, y) in answers.items()
        }

    assert gain == pytest.approx(pool(now) - pool(best), abs=1e-14)
    assert measure_gain(count_wins(bin_scores(now)), count_wins(bin_scores(best))) == gain
    assert measure_gain(count_wins(now), count_wins(now)) == 0
    assert measure_gain(count_wins(now), count_wins(random_answers(rng, [0, 1]))) is None
    assert measure_gain(count_wins({}), count_wins(best)) is None


def test_an_absent_site_changes_the_value_and_not_the_decision(tmp_path: Path) -> None:
    """Site 3 makes the fleet's AUC higher than it is elsewhere. Without it the second evaluation has a lower value than
    the first, though the model is better on the same rows: with a patience of one the run goes on.
    """
    agreement = make_choosing_agreement(patience=1, cycles=3, learning_rate=0.3)
    whole = create_run(agreement, make_choosing_grid(tmp_path / "one"), tmp_path / "whole")
    whole.train_to_end()
    rising = [record["validation_auc"] for record in whole.folder.read_records()]
    assert rising == sorted(set(rising)), "the model gets better with every cycle"
    grid = make_choosing_grid(tmp_path / "two")
    grid.sites["site-3"] = MisbehavingSite(grid.sites["site-3"], decline, "evaluate", [5])
    run = create_run(agreement, grid, tmp_path / "run")
    result = run.train_to_end()
    records = run.folder.read_records()
    assert [record["validation_sites"] for record in records] == [7, 6, 7]
    assert records[1]["validation_auc"] < records[0]["validation_auc"]
    assert records[1]["validation_auc_gain"] > 0
    # The third is compared with the second, over the sites that answered both.
    assert records[2]["validation_auc_gain"] > 0
    assert "stopped_early" not in result
    assert result["kept_round"] == 8
    with np.load(tmp_path / "run" / "model.npz") as ours, np.load(tmp_path / "whole" / "model.npz") as theirs:
        assert np.array_equal(ours["weight"], theirs["weight"])


def test_a_value_that_is_higher_for_want_of_a_site_is_not_the_best(tmp_path: Path) -> None:
    """Without site 0 the AUC is higher; the model of the second evaluation is the same as that of the first."""
    agreement = make_choosing_agreement(patience=None, cycles=2, learning_rate=1e-12)
    grid = make_choosing_grid(tmp_path / "sites")
    grid.sites["site-0"] = MisbehavingSite(grid.sites["site-0"], decline, "evaluate", [5])
    run = create_run(agreement, grid, tmp_path / "run")
    result = run.train_to_end()
    first, second = run.folder.read_records()
    assert second["validation_auc"] > first["validation_auc"]
    assert second["validation_auc_gain"] == 0
    assert result["kept_round"] == first["round"]


def test_where_nobody_answers_there_is_no_value(tmp_path: Path) -> None:
    """Sites that share nothing train, and have no say; then no round is the best one, and no patience is used up."""
    grid = make_choosing_grid(tmp_path / "sites", SitePolicy("nothing"))
    run = create_run(make_choosing_agreement(patience=None, cycles=2), grid, tmp_path / "run")
    result = run.train_to_end()
    assert [record["validation_auc"] for record in run.folder.read_records()] == [None, None]
    assert [record["validation_sites"] for record in run.folder.read_records()] == [0, 0]
    assert result["kept_round"] == 5
    assert result["attendance"]["site-0"] == {"answered": 2, "absent": 0, "refused": 0}
    going_on = create_run(make_choosing_agreement(keep="last", patience=1), grid, tmp_path / "on").train_to_end()
    assert "stopped_early" not in going_on


def test_one_site_that_shares_nothing_has_no_say(tmp_path: Path) -> None:
    sites = make_sites(small_federation(TIMES), tmp_path / "sites", held_out(), SCORES)
    closed = make_sites(small_federation(TIMES), tmp_path / "sites", held_out(), SitePolicy("nothing"))
    grid = MemoryGrid({**sites, "site-0": closed["site-0"]})
    run = create_run(make_choosing_agreement(keep="last", patience=None, cycles=1), grid, tmp_path / "run")
    final = run.train_to_end()["final"]
    rest = [part for client, part in split_small_federation().validation.items() if client]
    assert final["validation_positives"] == sum(int(part.labels.sum()) for part in rest)
    assert final["validation_sites"] == len(rest)


def test_a_site_without_test_rows_takes_part_in_the_choice(tmp_path: Path) -> None:
    sites = make_sites(small_federation(TIMES), tmp_path / "sites", held_out(), SCORES)
    sites["site-0"] = make_sites(small_federation(TIMES), tmp_path / "sites", None, SCORES)["site-0"]
    agreement = make_choosing_agreement(keep="last", patience=None, cycles=1)
    final = create_run(agreement, MemoryGrid(sites), tmp_path / "run").train_to_end()["final"]
    # The empty site has test rows and no validation rows.
    assert (final["test_sites"], final["validation_sites"]) == (7, 7)
    assert EMPTY not in split_small_federation().validation


def test_a_site_that_joins_holds_out_rows_too(tmp_path: Path) -> None:
    grid, out = make_choosing_grid(tmp_path / "sites"), tmp_path / "run"
    agreement = make_choosing_agreement(keep="last", patience=None, cycles=3)
    train_until_paused(create_run(without(agreement, LATER), grid, out), [], 2)
    result = resume_with(agreement, grid, out).train_to_end()
    assert [record["validation_sites"] for record in RunFolder(out).read_records()] == [6, 7, 7]
    assert result["attendance"][LATER]["answered"] == 2


def test_a_site_that_returns_with_other_rows_is_compared_anew(tmp_path: Path) -> None:
    """Site 6 leaves after the first cycle, and returns after the second with twice its rows, test rows included."""
    agreement = make_choosing_agreement(keep="last", patience=None, cycles=3)
    grid, out = make_choosing_grid(tmp_path / "sites"), tmp_path / "run"
    train_until_paused(create_run(agreement, grid, out), [], 2)
    train_until_paused(resume_with(without(agreement, "site-6"), grid, out), [], 5)
    site = grid.sites["site-6"]
    load_data = site._load_data

    def load_twice() -> SiteData:
        data = load_data()
        assert isinstance(data, SiteData)
        assert data.test is not None
        test = Examples(data.test.inputs.repeat(2, 1), data.test.labels.repeat(2))
        return SiteData(data.inputs.repeat(2, 1), np.concatenate([data.labels, data.labels]), test)

    site._load_data = load_twice
    result = resume_with(agreement, grid, out).train_to_end()
    records = RunFolder(out).read_records()
    assert [(record["test_sites"], record["validation_sites"]) for record in records] == [(8, 7), (7, 6), (8, 7)]
    assert records[2]["test_positives"] + records[2]["test_negatives"] == 200 + 25
    assert result["attendance"]["site-6"] == {"answered": 2, "absent": 0, "refused": 0}


# ------------------------------------------------------------------------------------------------ what sites may answer


def change_validation(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]) -> Any:
    def change_answer(header: dict[str, Any], trees: Trees) -> None:
        trees["validation_scores"] = change(*trees["validation_scores"])

    return change_answer


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda scores, labels: (scores[:-1], labels[:-1]), "it sends scores of "),
        (lambda scores, labels: (scores.repeat(9), labels.repeat(9)), "a part of 0.3 of a class is not that"),
        (lambda scores, labels: (scores * torch.nan, labels), "its scores are not finite"),
        (lambda scores, labels: (scores, labels + 1), "its labels are not 0 and 1"),
        (lambda scores, labels: (scores,), "expected are scores and labels of the same length"),
    ],
)
def test_implausible_validation_scores_are_refused(
    change: Any, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The site's test rows are not used either, as its whole answer is refused."""
    grid = make_choosing_grid(tmp_path / "sites")
    grid.sites["site-4"] = MisbehavingSite(grid.sites["site-4"], change_validation(change), "evaluate", [5])
    run = create_run(make_choosing_agreement(keep="last", patience=None, cycles=2), grid, tmp_path / "run")
    run.train_to_end()
    assert reason in caplog.text
    assert [(r["test_sites"], r["validation_sites"]) for r in run.folder.read_records()] == [(8, 7), (7, 6)]


def forget_setting(site: Site) -> None:
    """Let a site answer as one from before there was the setting: it trains on all rows, and confirms nothing."""
    answer_message = site.answer_message

    def answer(payload: Payload) -> Payload:
        header = {key: value for key, value in payload.read_header().items() if key != "validation_fraction"}
        return answer_message(Payload(json.dumps(header), payload.body))

    site.answer_message = answer  # type: ignore[method-assign]


def test_a_site_that_does_not_know_the_setting_is_refused(tmp_path: Path) -> None:
    grid = make_choosing_grid(tmp_path / "sites")
    forget_setting(grid.sites["site-0"])
    reason = "site 'site-0': it does not confirm validation-fraction = 0.3, and would train on all of its rows"
    with pytest.raises(TrainingStopped, match=f"{reason}: upgrade fedauc at the site"):
        create_run(make_choosing_agreement(policy={"on_site_failure": "stop"}), grid, tmp_path / "stopped")
    result = create_run(make_choosing_agreement(cycles=1), grid, tmp_path / "run").train_to_end()
    assert result["attendance"]["site-0"]["answered"] == 0


@pytest.mark.parametrize("fraction", [1.0, -0.1, "0.2", True, None])
def test_a_site_refuses_a_fraction_that_is_none(fraction: Any, tmp_path: Path) -> None:
    site = make_sites(small_federation(), tmp_path)["site-0"]
    answer = site.answer_message(pack_payload({"kind": "register", "validation_fraction": fraction})).read_header()
    assert answer["reason"].startswith("validation_fraction is ")


# --------------------------------------------------------------------------------------------------------- the plan


def test_the_plan_says_what_is_held_out_and_a_site_holds_to_it() -> None:
    plain, choosing = make_agreement("cycp-fedavg", {"evaluation": "scores"}), make_choosing_agreement()
    assert "validation_fraction" not in describe_plan(plain)
    plan = describe_plan(choosing)
    assert plan["validation_fraction"] == FRACTION
    admitted = read_plan(plan)
    registration: dict[str, Any] = {"kind": "register", "schema": None, "hides_counts": False, "secure_sum": False}
    registration["validation_fraction"] = FRACTION
    without_it = replace(choosing, recipe=plain.recipe, policy=plain.policy)
    assert hash_plan(describe_plan(without_it)) == hash_plan(describe_plan(plain)) != hash_plan(plan)
    check_against_plan(registration, admitted)
    check_against_plan({"kind": "unmask"}, admitted)
    for fraction in (0.9, 0.0):
        with pytest.raises(SiteRefusal, match=f"holds out {fraction} of the training rows; the plan says 0.3"):
            check_against_plan({**registration, "kind": "evaluate", "validation_fraction": fraction}, admitted)
    for wrong in (1.0, -0.1, "0.3", True):
        with pytest.raises(SiteRefusal, match="validation_fraction is "):
            read_plan({**plan, "validation_fraction": wrong})


def test_the_best_model_is_delivered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Controlled hospitals with a schema: the best model arrives with its own AUC, and `show` names its round."""
    agreement = make_hospital_agreement(validation_fraction=FRACTION)
    recipe = replace(agreement.recipe, keep="best", patience=2, cycles=12, learning_rate=0.5)
    agreement = replace(agreement, recipe=recipe)
    run = start_hospital_run(make_controlled_sites(tmp_path / "sites"), tmp_path / "run", agreement)
    result = run.train_to_end()
    assert result["kept_round"] == result["final"]["round"] < run.folder.read_records()[-1]["round"]
    summary = summarize_run(tmp_path / "run")
    assert summary["delivery"] == dict.fromkeys(HOSPITALS, "delivered")
    with np.load(tmp_path / "run" / "model.npz") as arrays:
        digest = hash_tensors({name: torch.from_numpy(arrays[name]) for name in arrays.files})
    for name in HOSPITALS:
        (folder,) = (tmp_path / "sites" / name / "state" / "models").iterdir()
        origin, card = json.loads((folder / "delivery.json").read_text()), (folder / "MODEL_CARD.md").read_text()
        assert verify_model(folder) == []
        assert (origin["sha256"], origin["round"]) == (digest, result["kept_round"])
        assert f"{result['final']['auc']:.4f}" in card
        # 120 rows, of which 36 are test rows and about 25 validation rows.
        assert "validation, this site" in card
    shown = fedauc(capsys, "federation", "show", str(tmp_path / "run")).out
    assert f"stopped early: {result['stopped_early']}" in " ".join(shown.split())
    assert f"the model is that of the best evaluation: round {result['kept_round'] + 1}: AUC" in " ".join(shown.split())
    assert f"validation AUC {result['final']['validation_auc']:.4f}, between" in " ".join(shown.split())


# ---------------------------------------------------------------------------------------------------------- refusals


def test_what_chooses_a_round_needs_the_setting() -> None:
    remedy = r"set validation-fraction, for example to 0\.2, so that every site holds out training rows, or leave"
    with pytest.raises(ValueError, match=f"keep is 'best', but there are no validation rows .*: {remedy} keep at its"):
        make_agreement("cycp-minimax", keep="best")
    with pytest.raises(ValueError, match=f"patience is 3, but there are no validation rows .*: {remedy} patience at"):
        make_agreement("cycp-minimax", patience=3)
    with pytest.raises(ValueError, match=f"'early-stopping', which needs validation rows: {remedy} it out"):
        replace(make_agreement("cycp-minimax"), callbacks=(EarlyStopping(2),))


def test_the_setting_needs_scores_which_a_private_run_does_not_ask_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"validation_fraction is 1\.0; it must be"):
        make_policy(validation_fraction=1.0)
    problem = r"^validation-fraction is 0\.3, but evaluation is 'none', so that no site sends scores:"
    silent = {"evaluation": "none", "validation_fraction": FRACTION}
    with pytest.raises(ValueError, match=f"{problem} set evaluation to 'histograms' or 'scores', or leave validation"):
        make_agreement("cycp-fedavg", silent)
    private: dict[str, Any] = {"transforms": (ClientDP(noise_multiplier=1.5),), "participation": "full"}
    with pytest.raises(ValueError, match=f"{problem} leave it at 0, because a private run asks for no scores$"):
        make_agreement("cycp-fedavg", silent, **private)
    with pytest.raises(
        ValueError, match="but scores of rows that a private run protects are not noised: leave it at 0"
    ):
        make_agreement("cycp-fedavg", {**silent, "evaluation": "histograms"}, **private)
    asking = make_agreement("cycp-fedavg", {"evaluation": "histograms"}, **private)
    with pytest.raises(ValueError, match="evaluation is 'histograms'; scores of held-out rows are not noised"):
        create_run(asking, make_choosing_grid(tmp_path / "sites"), tmp_path / "run")


def test_secure_sums_may_choose_a_round(tmp_path: Path) -> None:
    """Uploads are summed securely, and histograms of single sites are sent as before."""
    agreement = make_choosing_agreement(
        policy={"evaluation": "histograms", "patience": 9}, participation="full", transforms=(SecureSum(),), cycles=2
    )
    run = create_run(agreement, make_choosing_grid(tmp_path / "sites"), tmp_path / "run")
    assert run.train_to_end()["final"]["validation_sites"] == 7


def test_the_run_configuration_tells_the_two_patiences_apart() -> None:
    sites = make_agreement("cycp-minimax").sites
    config = {
        "method": "cycp-minimax",
        "validation-fraction": 0.2,
        "patience": 7,
        "options": "keep=best patience=5",
    }
    agreement = read_run_config(config, sites)
    assert (agreement.policy.validation_fraction, agreement.policy.patience) == (0.2, 7)
    assert (agreement.recipe.keep, agreement.recipe.patience) == ("best", 5)
    assert [type(callback).__name__ for callback in agreement.choose_callbacks()] == ["BestModel", "EarlyStopping"]
