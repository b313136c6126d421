"""Records of finished runs, and the runs that make them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from every_cycle import every_cycle  # noqa: F401
from fedauc.data.datasets.synthetic import Synthetic
from fedauc.experiments.config import Config
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.run_group import plan_run_groups
from fedauc.experiments.run_loop import Observer, Progress
from fedauc.experiments.runner import DataCache, Run
from fedauc.metrics import auc, delong_interval
from paper.records import MOST_ROWS, Record, RecordStore, read_json_lines, run_name
from paper.run_queue import OutOfTime, RunQueue
from paper.scales import PAPER, SMOKE, Scale
from paper.table_specs import CellSpec, Column, Row, TableSpec, cell_configs
from paper.tuning import ChoiceStore, TuningChoice, TuningJob, TuningPlan, tune_rows

FEDAVG, MINIMAX = (Row(method, method) for method in ("cycp-fedavg", "cycp-minimax"))


def config(method: str = "cycp-fedavg", **changes: str) -> Config:
    """A smoke run; changes are options, with __ for the dot and _ for the dash."""
    return SMOKE.build_config(
        "cifar10", method, {k.replace("__", ".").replace("_", "-"): v for k, v in changes.items()}
    )


def silent(place: str) -> Observer:
    return lambda progress: None


def shop(folder: Path, observer: object = silent, **changes: float) -> RunQueue:
    return RunQueue(RecordStore(folder / "records"), folder / "work", "cpu", observer, **changes)  # type: ignore[arg-type]


def known(store: RecordStore, asked: Config) -> Record:
    found = store.find_record(asked)
    assert found is not None
    return found


def count_records(folder: Path) -> int:
    return len(read_json_lines(folder / "synthetic.jsonl", dict))


def finished(folder: Path, asked: Config) -> RunFolder:
    run = Run.create(asked, folder)
    run.train_to_end()
    return run.folder


# ------------------------------------------------------------------------------------------------------------- records


def test_a_record_says_what_the_run_folder_says(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run", config("cycp-pairwise"))
    RecordStore(tmp_path / "records").add_run(folder)
    found, last = known(RecordStore(tmp_path / "records"), config("cycp-pairwise")), folder.read_records()[-1]
    assert found.final_point is not None
    assert (found.auc, found.low, found.high) == (last["auc"], last["low"], last["high"])
    assert found.final_point.auc == last["auc"]
    assert found.final_point.validation_auc == last["validation_auc"]
    assert found.final_point.bytes == last["bytes_up"] + last["bytes_down"]
    # Three learning cycles of four rounds, after one that scores.
    assert [(point.cycle, point.rounds) for point in found.curve] == [(1, 8), (2, 12), (3, 16)]
    assert set(found.versions) == {"fedauc", "python", "torch", "numpy", "gpu"}


def test_a_record_is_found_whatever_the_engine(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "records")
    store.add_run(finished(tmp_path / "run", config()))
    assert store.find_record(config(engine="loop")) == store.find_record(config()) is not None
    assert store.find_record(config(seed="1")) is None
    assert store.find_record(config(learning_rate="0.2")) is None


def test_ranks_keep_auc_and_interval_to_the_last_digit(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run", config())
    store = RecordStore(tmp_path / "records")
    store.add_run(folder)
    kept, (labels, scores) = store.load_ranks(config()), folder.read_scores()
    assert kept is not None
    assert kept.ranks.dtype == np.uint16
    assert auc(kept.labels, kept.ranks) == auc(labels, scores)
    assert delong_interval(kept.labels, kept.ranks) == delong_interval(labels, scores)


@pytest.mark.parametrize("rows", [MOST_ROWS, 2 * MOST_ROWS])
def test_a_records_files_are_small(tmp_path: Path, rows: int) -> None:
    """22,500 test rows, a little more than ChestMNIST's, or twice that: at most 50 kB, and every positive is kept."""
    data = Synthetic(clients=rows // 100, rows_per_client=100, features=5)
    asked = replace(config(cycles="1", partition__clients="20"), data=data)
    store, folder = RecordStore(tmp_path / "records"), finished(tmp_path / "run", asked)
    store.add_run(folder)
    sizes = [path.stat().st_size for path in store.path.rglob("*.*")]
    assert len(sizes) == 2
    assert max(sizes) < 50_000
    kept, (labels, scores) = store.load_ranks(asked), folder.read_scores()
    assert kept is not None
    assert len(kept.labels) == MOST_ROWS
    assert kept.labels.sum() == labels.sum() == rows // 10
    # Half of the negatives move the AUC by less than its standard error, .002 with 4,500 positives.
    assert auc(kept.labels, kept.ranks) == pytest.approx(auc(labels, scores), abs=0.002)


# ---------------------------------------------------------------------------------------------------------------- runs


def test_what_has_a_record_does_not_run_again(tmp_path: Path) -> None:
    ran: list[str] = []

    def observer(place: str) -> Observer:
        ran.append(place)
        return lambda progress: None

    shop(tmp_path, observer).run_missing([config(), config(seed="1"), config()])
    assert ran == [run_name(config()), run_name(config(seed="1"))]
    shop(tmp_path, observer).run_missing([config(), config(seed="1")])
    assert len(ran) == 2
    assert list((tmp_path / "work").iterdir()) == []


def test_runs_on_the_same_data_come_one_after_another(tmp_path: Path) -> None:
    """Two splits, asked for by turns: the loader keeps the last, so each is loaded once on the way."""
    ran: list[str] = []

    def observer(place: str) -> Observer:
        ran.append(place)
        return lambda progress: None

    asked = [config(method, data_seed=split) for method in ("cycp-fedavg", "fedavg") for split in ("0", "1")]
    shop(tmp_path, observer).run_missing(asked)
    assert ran == [run_name(asked[place]) for place in (0, 2, 1, 3)]


def test_a_run_that_cannot_go_on_has_a_record_too(tmp_path: Path) -> None:
    """Minimax on raw scores with a step of 1,000 diverges at once; the run beside it goes on."""
    bad = config("cycp-minimax", objective__score="identity", learning_rate="1000")
    told = dict[str, bool]()

    def observer(place: str) -> Observer:
        def see(progress: Progress) -> None:
            told[place] = progress.stopped
            # Time is out as soon as it stops: what is known by then is kept all the same.
            made.deadline = time.monotonic() - 1 if progress.stopped else made.deadline

        return see

    made = shop(tmp_path, observer)
    with pytest.raises(OutOfTime):
        made.run_missing([bad, config()])
    assert told == {run_name(bad): True}
    made.deadline = float("inf")
    made.run_missing([config()])
    found = known(RecordStore(tmp_path / "records"), bad)
    assert found.stopped.startswith("stopped in round")
    assert found.final_point is None
    assert made.store.load_ranks(bad) is None
    assert known(made.store, config()).final_point is not None


class Clock:
    """Runs out after so many rounds."""

    def __init__(self, made: RunQueue, rounds: int) -> None:
        self._shop, self._left = made, rounds

    def __call__(self, place: str) -> Observer:
        def see(progress: Progress) -> None:
            self._left -= progress.done > 0
            if self._left == 0:
                self._shop.deadline = time.monotonic() - 1

        return see


@pytest.mark.parametrize("rounds", [1, 6, 11, 12, 13])
def test_a_run_out_of_time_goes_on_to_the_same_record(tmp_path: Path, rounds: int) -> None:
    """Two runs of twelve rounds: stopped early, late, at the first's end, in the second."""
    asked = [config(), config(seed="1")]
    shop(tmp_path / "whole").run_missing(asked)
    made = shop(tmp_path / "parts")
    made.observer = Clock(made, rounds)
    with made, pytest.raises(OutOfTime):
        made.run_missing(asked)
    assert sum(made.store.find_record(each) is not None for each in asked) == (rounds >= 12)
    shop(tmp_path / "parts").run_missing(asked)
    for each in asked:
        parts, whole = (known(RecordStore(tmp_path / path / "records"), each) for path in ("parts", "whole"))
        assert replace(parts, seconds=0) == replace(whole, seconds=0)


def test_nothing_starts_after_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(OutOfTime):
        shop(tmp_path, deadline=time.monotonic() - 1).run_missing([config()])
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(("engine", "first"), [("auto", 6), ("loop", 0)])
def test_only_a_folder_of_the_same_configuration_is_gone_on_with(tmp_path: Path, engine: str, first: int) -> None:
    """A run left after six rounds is saved there; one of another engine (or device) begins anew."""
    begun = shop(tmp_path)
    begun.observer = Clock(begun, 6)
    with begun, pytest.raises(OutOfTime):
        begun.run_missing([config(engine=engine)])
    seen: list[int] = []
    made = shop(tmp_path, lambda place: lambda progress: seen.append(progress.done))
    made.run_missing([config()])
    assert seen[0] == first
    assert known(made.store, config()).final_point is not None


def test_seeds_and_steps_share_a_graph(tmp_path: Path) -> None:
    """Lanes on a CPU give what the stacked engine gives, up to rounding, and all runs are one group."""
    asked = [config(seed=str(seed), learning_rate=step) for seed in range(2) for step in ("0.1", "0.01")]
    lanes = [config(seed=str(s), learning_rate=step, engine="graphed") for s in range(2) for step in ("0.1", "0.01")]
    assert len(plan_run_groups({run_name(each): each for each in lanes}, DataCache())) == 1
    shop(tmp_path / "alone").run_missing(asked)
    shop(tmp_path / "lanes").run_missing(lanes)
    for each in asked:
        one, two = (known(RecordStore(tmp_path / path / "records"), each).auc for path in ("alone", "lanes"))
        assert one == pytest.approx(two, abs=1e-6)


@pytest.mark.usefixtures("every_cycle")
def test_the_last_checkpoint_is_left_out(tmp_path: Path) -> None:
    """Three cycles: the state before the first round and after two cycles; the result follows the third."""
    rounds: list[list[str]] = []

    def observer(place: str) -> Observer:
        folder = tmp_path / "work" / place / "checkpoints"
        return lambda progress: rounds.append(sorted(path.stem for path in folder.iterdir()))

    shop(tmp_path, observer).run_missing([config()])
    assert rounds[-1] == ["round-00000004", "round-00000008"]


# -------------------------------------------------------------------------------------------------------------- tuning


def sheet(*rows: Row, datasets: Sequence[str] = ("cifar10",)) -> TableSpec:
    return TableSpec("made", "Made up", rows, tuple(Column(each, each) for each in datasets))


def tune(tables: Sequence[TableSpec], scale: Scale, queue: RunQueue, requested: TuningPlan | None) -> ChoiceStore:
    choices = ChoiceStore(queue.store, scale)
    tune_rows(tables, choices, queue, requested)
    return choices


def test_the_choice_is_the_best_on_validation(tmp_path: Path) -> None:
    """Three learning rates in one rung of 4 cycles each; the record beside each says what it was judged by."""
    made = shop(tmp_path)
    choices = tune([sheet(FEDAVG)], SMOKE, made, TuningPlan("steps", 12))
    found = choices.find_choice(TuningJob("cifar10", FEDAVG))
    assert found is not None
    assert (found.runs, found.cycles, found.budget) == (3, 12, 12)
    values = {}
    for step in ("0.1", "0.01", "0.001"):
        record = known(made.store, config(cycles="4", evaluate_every="4", learning_rate=step))
        assert record.final_point is not None
        assert record.final_point.validation_auc != record.final_point.auc
        values[step] = record.final_point.validation_auc
    assert {each["settings"]["learning-rate"]: each["validation_auc"] for each in found.trials} == values
    assert found.settings == {"learning-rate": max(values, key=lambda step: values[step] or 0)}
    assert list((tmp_path / "records").glob("*.npz")) == []


def test_rows_cost_the_same_and_are_tuned_once(tmp_path: Path) -> None:
    """FedAvg has 3 candidates, minimax 9 in two rungs: 18 cycles each. The other dataset is tuned by itself."""
    jobs = [sheet(FEDAVG, MINIMAX), sheet(FEDAVG, datasets=("cifar100", "cifar10"))]
    choices = tune(jobs, SMOKE, shop(tmp_path), TuningPlan("steps", 18))
    asked = [TuningJob("cifar10", FEDAVG), TuningJob("cifar10", MINIMAX), TuningJob("cifar100", FEDAVG)]
    found = [choices.find_choice(job) for job in asked]
    assert [each and (each.runs, each.cycles) for each in found] == [(3, 18), (12, 18), (3, 18)]
    count = count_records(tmp_path / "records")
    assert count == 3 + 12 + 3
    again = tune(jobs, SMOKE, shop(tmp_path), None)
    assert [again.find_choice(job) for job in asked] == found
    assert count_records(tmp_path / "records") == count


def test_a_column_has_a_grid_of_its_own_unless_another_is_asked_for(tmp_path: Path) -> None:
    """Four learning rates in the wide grid, of which two go on; three in the other."""
    made, job = shop(tmp_path), TuningJob("cifar10", FEDAVG)
    wide = TableSpec("made", "Made up", (FEDAVG,), (Column("cifar10", "cifar10", grid="wide"),))
    for asked, grid, count in ((None, "wide", 6), (TuningPlan("steps", 9), "steps", 3)):
        found = tune([wide], SMOKE, made, asked).find_choice(job)
        assert found is not None
        assert (found.grid, found.runs) == (grid, count)


def test_another_tuning_replaces_a_choice_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, job = shop(tmp_path), TuningJob("cifar10", FEDAVG)
    with caplog.at_level("INFO", "fedauc"):
        for words in ("none", "steps:9", "full"):
            tune([sheet(FEDAVG)], SMOKE, made, TuningPlan.parse(words, SMOKE))
            chosen = ChoiceStore(made.store, SMOKE).chosen_settings(job)
            assert (chosen == {}) == (words == "none")
    assert caplog.messages == ["cifar10-cycp-fedavg was tuned over steps:9; from now on over full"]
    # To tune nothing is no reason to forget what was found, which every table has.
    tune([sheet(FEDAVG)], SMOKE, made, TuningPlan.parse("none", SMOKE))
    assert ChoiceStore(made.store, SMOKE).chosen_settings(job) == chosen


def test_without_a_validation_part_there_is_no_tuning(tmp_path: Path) -> None:
    """Fraud data are split in two only."""
    bare = {"data": "creditcard", "partition": "natural", "model": "linear"}
    scale = replace(SMOKE, datasets={"cifar10": bare}, groups=8)
    with pytest.raises(ValueError, match="creditcard has no validation part to tune on: use --tuning none"):
        tune([sheet(FEDAVG)], scale, shop(tmp_path), TuningPlan("steps", 3))


def test_a_tuning_is_read_from_a_word() -> None:
    assert TuningPlan.parse("paper", PAPER).grid == "paper"
    assert {word: TuningPlan.parse(word, PAPER).budget for word in ("paper", "full", "full:90")} == {
        "paper": 120,
        "full": 200,
        "full:90": 90,
    }
    with pytest.raises(ValueError, match="tuning is 'steps:0'; it needs at least a cycle"):
        TuningPlan.parse("steps:0", PAPER)
    with pytest.raises(ValueError, match="unknown grid 'step': did you mean 'steps'"):
        TuningPlan.parse("step:3", PAPER)
    with pytest.raises(ValueError, match="tuning is 'steps:x'; it must be a grid and cycles"):
        TuningPlan.parse("steps:x", PAPER)


def test_a_run_that_serves_two_rows_is_counted_once(tmp_path: Path) -> None:
    """The minimax methods have sigmoid scores by default, so that a row which asks for them has the same run."""
    plain, same = Row("plain", "cycp-minimax"), Row("same", "cycp-minimax", {"objective.score": "sigmoid"})
    judged = ({"settings": {"learning-rate": "0.01"}, "cycles": 2}, {"settings": {"learning-rate": "0.1"}, "cycles": 2})
    chosen = {TuningJob("cifar10", each): TuningChoice({}, "steps", 4, judged) for each in (plain, same)}
    assert ChoiceStore(RecordStore(tmp_path), PAPER).total_cost(chosen) == (2, 4, 0.0)


def test_a_choice_is_made_anew_where_its_runs_would_be_others_today(tmp_path: Path) -> None:
    """Over the grid it was made over, whatever the column's own is."""
    place, job, tuning = shop(tmp_path), TuningJob("cifar10", FEDAVG), TuningPlan.parse("full", SMOKE)
    before = tune([sheet(FEDAVG)], SMOKE, place, tuning).find_choice(job)
    other = replace(SMOKE, method_options={"cifar10": {"cycp-fedavg": {"negatives": "9"}}})
    assert before is not None
    assert ChoiceStore(place.store, SMOKE).is_current(job, before)
    assert not ChoiceStore(place.store, other).is_current(job, before)
    after = tune([sheet(FEDAVG)], other, place, None).find_choice(job)
    assert after is not None
    assert ChoiceStore(place.store, other).is_current(job, after)
    assert (after.grid, after.budget) == (before.grid, before.budget) == ("full", 2 * SMOKE.cycles)
    assert [each["validation_auc"] for each in after.trials] != [each["validation_auc"] for each in before.trials]


def test_a_damaged_choice_is_named(tmp_path: Path) -> None:
    ChoiceStore(RecordStore(tmp_path), PAPER).add_choice(TuningJob("cifar10", FEDAVG), TuningChoice({}, "none", 0))
    path = tmp_path / "paper-choices.jsonl"
    for damaged in ("{", "[]", '{"format": 1, "other": 1}', "\xff"):
        path.write_bytes(damaged.encode("latin-1") + b"\n")
        with pytest.raises(ValueError, match=rf"^line 1 of {path} is damaged \(.*\); delete that line"):
            ChoiceStore(RecordStore(tmp_path), PAPER).find_choice(TuningJob("cifar10", FEDAVG))


def test_a_candidate_that_is_a_tables_run_is_kept_as_one(tmp_path: Path) -> None:
    """With its ranks, without which it would not be tested; those of short rungs have none."""
    for tuning, kept in (TuningPlan.parse("full", SMOKE), True), (TuningPlan("steps", 3), False):
        place = shop(tmp_path / tuning.grid)
        choices = tune([sheet(FEDAVG)], SMOKE, place, tuning)
        choice = choices.find_choice(TuningJob("cifar10", FEDAVG))
        assert choice is not None
        cycles = {each["cycles"] for each in choice.trials}
        assert cycles == ({SMOKE.cycles} if kept else {1})
        tried = [SMOKE.build_config("cifar10", "cycp-fedavg", each["settings"]) for each in choice.trials]
        assert all((place.store.load_ranks(each) is not None) == kept for each in tried)


def test_a_point_is_tuned_by_itself_in_whole_runs_of_its_own(tmp_path: Path) -> None:
    """One local step in twice the cycles; until then the point has what its dataset has."""
    place, case = shop(tmp_path), {"local-steps": "1", "cycles": "6"}
    base, point = Column("cifar10", "cifar10"), Column("cifar10-I1", "cifar10", (case,), tuned_case=case, grid="lower")
    whole, mine = TuningJob("cifar10", FEDAVG), TuningJob.for_cell(CellSpec(FEDAVG, replace(point, tested=False)))
    choices = ChoiceStore(place.store, SMOKE)
    choices.add_choice(whole, TuningChoice({"learning-rate": "0.7"}, "none", 0))
    assert (choices.find_choice(mine), choices.chosen_settings(mine)) == (None, {"learning-rate": "0.7"})
    made = TableSpec("made", "Made up", (FEDAVG,), (point,))
    tune_rows([made], choices, place, None)
    found = choices.find_choice(mine)
    assert found is not None
    assert (found.grid, found.runs, found.cycles, found.budget) == ("lower", 3, 18, 3 * SMOKE.cycles)
    tried = [config(learning_rate=step, local_steps="1", cycles="6") for step in ("0.1", "0.03", "0.01")]
    aucs = [known(place.store, each).final_point for each in tried]
    assert [each["validation_auc"] for each in found.trials] == [each and each.validation_auc for each in aucs]
    assert choices.is_current(mine, found)
    assert choices.chosen_settings(mine) == found.settings
    # Its runs are its cell's, and nobody else's: the dataset's choice stays.
    assert cell_configs(SMOKE, CellSpec(FEDAVG, point), found.settings, (0,))[0][0] in tried
    assert choices.chosen_settings(TuningJob.for_cell(CellSpec(FEDAVG, base))) == {"learning-rate": "0.7"}
    assert all(place.store.load_ranks(each) is None for each in tried)


def test_the_candidates_of_a_point_are_no_tables_runs(tmp_path: Path) -> None:
    """One client per round in as many cycles as a table's runs have: they keep no ranks."""
    place, case = shop(tmp_path), {"participation.per-round": "1"}
    point = Column("cifar10-M1", "cifar10", (case,), tested=False, tuned_case=case, grid="lower")
    tune([TableSpec("made", "Made up", (FEDAVG,), (point,))], SMOKE, place, None)
    assert count_records(tmp_path / "records") == 3
    assert list((tmp_path / "records").glob("*.npz")) == []


def test_a_points_short_rungs_have_its_share_of_cycles(tmp_path: Path) -> None:
    """Twice the cycles of the scale: rungs of one cycle are two of its own, and the choice counts those."""
    place, case = shop(tmp_path), {"local-steps": "1", "cycles": str(2 * SMOKE.cycles)}
    point = Column("cifar10-I1", "cifar10", (case,), tuned_case=case, grid="lower")
    found = tune([TableSpec("made", "Made up", (FEDAVG,), (point,))], SMOKE, place, TuningPlan("steps", 3))
    choice = found.find_choice(TuningJob.for_cell(CellSpec(FEDAVG, point)))
    assert choice is not None
    assert (choice.runs, choice.cycles) == (3, 6)
    assert (
        place.store.find_record(config(learning_rate="0.1", local_steps="1", cycles="2", evaluate_every="2"))
        is not None
    )


def test_a_tuning_asked_for_is_for_points_where_a_sheet_has_some(tmp_path: Path) -> None:
    """The dataset's choice is all tables': a figure makes it over its column's grid, if there is none, and keeps it."""
    place, case = shop(tmp_path), {"participation.per-round": "1"}
    point = Column("cifar10-M1", "cifar10", (case,), tested=False, tuned_case=case, grid="lower")
    made = TableSpec("made", "Made up", (FEDAVG,), (point, Column("cifar10-M5", "cifar10", grid="full")))
    for _ in range(2):
        found = tune([made], SMOKE, place, TuningPlan("steps", 3))
        grids = [
            each and each.grid
            for each in (found.find_choice(TuningJob.for_cell(CellSpec(FEDAVG, column))) for column in made.columns)
        ]
        assert grids == ["steps", "full"]
    again = tune([sheet(FEDAVG)], SMOKE, place, TuningPlan("steps", 3)).find_choice(TuningJob("cifar10", FEDAVG))
    assert again is not None
    assert again.grid == "steps"
