"""What the paper's tables and figures run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedauc.algorithms import find_methods
from fedauc.algorithms.compositional import CompositionalPairwise
from fedauc.algorithms.local_pairs import LocalPairs
from fedauc.data.datasets.cifar import Cifar10
from fedauc.data.datasets.creditcard import CreditCardFull
from fedauc.data.partitions import IID, Dirichlet
from fedauc.experiments.config import Config
from fedauc.experiments.presets import name_preset
from fedauc.experiments.runner import DataCache, assemble_run
from fedauc.models.mlp import MLP
from fedauc.models.resnet import ResNet18
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.full import Full
from fedauc.stages import Constant, Geometric, Milestones
from paper.scales import PAPER, SCALES, SMOKE, Scale
from paper.table_specs import METHODS, CellSpec, Row, TableSpec, build_tables, cell_configs, list_cells
from paper.tuning import TuningJob, TuningPlan


def configs(scale: Scale, sheet: TableSpec) -> dict[tuple[str, str], Config]:
    """The first run of every cell."""
    return {(cell.row.name, cell.column.name): cell_configs(scale, cell, {}, [0])[0][0] for cell in list_cells(sheet)}


def test_table_1_runs_the_settings_of_the_target() -> None:
    """Class 0, dir .5, N = 100, K = 10 whole groups, 95 % of positives removed, 100 cycles, I = 16, 32 rows."""
    found = configs(PAPER, build_tables(PAPER)["table1"])["cycp-pairwise", "cifar10"]
    recipe = found.recipe
    assert found.data == Cifar10(positive="0")
    assert found.preparation.partition == Dirichlet(clients=100, concentration=0.5)
    assert (found.preparation.remove_positives, found.preparation.flip_positives) == (0.95, 0)
    assert found.model == ResNet18(stem="imagenet", norm="group")
    assert recipe.participation == Cyclic(groups=10, per_round=None)
    assert (recipe.cycles, recipe.local_steps, recipe.positives, recipe.negatives) == (100, 16, 4, 28)
    assert (recipe.augment, recipe.precision, recipe.algorithm.weight_decay) == ("crop-flip", "mixed", 1e-3)
    assert (recipe.stages, recipe.stage_output) == (Milestones(decay=1.0), "round_mean")


def test_schedules_lead_to_batches_and_those_to_what_the_tables_have() -> None:
    """Other cells change it; rows have settings of their own, and tuning would change nothing."""
    schedules, batches = (build_tables(PAPER)[name] for name in ("schedules", "batches"))
    before, after = configs(PAPER, schedules), configs(PAPER, batches)
    assert (
        before["cycp-pairwise-0.1", "cifar10-constant-mean-1e-3"]
        == (after["cycp-pairwise-16-16-0.1", "cifar10-clients-1e-3"])
    )
    chosen = {
        ("cycp-fedavg-0.1", "cifar10-clients-1e-3"): ("cycp-fedavg", {"learning-rate": "0.1"}),
        ("cycp-minimax-4-28-0.01", "cifar10-clients-3e-3"): ("cycp-minimax", {"learning-rate": "0.01"}),
        ("cycp-pairwise-4-28-0.1", "cifar10-pooled-1e-3"): ("cycp-pairwise", {"learning-rate": "0.1"}),
    }
    for cell, (method, settings) in chosen.items():
        prox = {"algorithm.prox": "0.01"} if method == "cycp-minimax" else {}
        assert after[cell] == PAPER.build_config("cifar10", method, settings | prox)
    assert (len(set(before.values())), len(set(after.values()))) == (16, 44)
    for (row, _), config in configs(PAPER, build_tables(PAPER)["alike"]).items():
        assert config == after[row, "cifar10-clients-1e-3"]
    assert {column.grid for sheet in (schedules, batches) for column in sheet.columns} == {"none"}


def test_flips_and_skews_reach_the_preparation() -> None:
    flipped = configs(PAPER, build_tables(PAPER)["table2"])["cycp-fedavg", "cifar10"]
    assert flipped.preparation.flip_positives == 0.2
    skewed = configs(PAPER, build_tables(PAPER)["table4"])["cycp-fedavg", "dir10-flip0.2"]
    assert skewed.data.name == "cifar100"
    assert skewed.preparation.partition == Dirichlet(clients=100, concentration=10)
    noisy = configs(PAPER, build_tables(PAPER)["noise"])["square", "cifar10-0.05"].preparation
    assert (noisy.flip_positives, noisy.flip_negatives) == (0.05, 0.05)


def test_table_8_varies_the_clients() -> None:
    """Groups of 5 take part whole; of groups of 20 (fewer where clients are empty) ten clients do."""
    found = configs(PAPER, build_tables(PAPER)["table8"])
    made = {name: found["cycp-fedavg", name] for name in ("cifar10-50", "cifar100-200")}
    assert {name: config.preparation.partition for name, config in made.items()} == {
        "cifar10-50": Dirichlet(clients=50, concentration=0.1),
        "cifar100-200": Dirichlet(clients=200, concentration=0.1),
    }
    assert [config.recipe.participation for config in made.values()] == [Cyclic(groups=10), Cyclic(10, 10)]


def test_table_9_and_the_classes_repeat_on_other_data() -> None:
    removal, classes = (next(list_cells(build_tables(PAPER)[name])) for name in ("table9", "classes"))
    assert [[config.data_seed for config in case] for case in cell_configs(PAPER, removal, {}, [0, 1])] == [
        [0, 0],
        [1, 1],
        [2, 2],
    ]
    assert [case[0].data for case in cell_configs(PAPER, classes, {}, [0])] == [
        Cifar10(positive=str(k)) for k in range(5)
    ]


def test_card_fraud_has_every_method_on_splits_of_its_own() -> None:
    """Seventeen methods and pooled rows; five splits with one seed each, whatever seeds are asked for.

    Other objectives and local pairs are compared elsewhere (docs/objectives.md and docs/methods.md).
    """
    sheet = build_tables(PAPER)["creditcard"]
    elsewhere = {CompositionalPairwise, LocalPairs}
    assert {entry.method for entry in sheet.rows} == {
        name for name, method in find_methods().items() if method.algorithm not in elsewhere
    }
    assert len(sheet.rows) == 18
    for cell in list_cells(sheet):
        found = [config for case in cell_configs(PAPER, cell, {}, [5, 6, 7]) for config in case]
        assert [(config.data_seed, config.recipe.seed) for config in found] == [(split, 0) for split in range(5)]
        assert {config.data for config in found} == {CreditCardFull(validation_fraction=0.2)}


def test_card_fraud_is_grouped_by_time_of_day_where_there_are_groups() -> None:
    """No number of groups: the data's own. Methods that visit everyone have none; `central` is one client."""
    found = configs(PAPER, build_tables(PAPER)["creditcard"])
    assert found["cycp-minimax", "creditcard"].recipe.participation == Cyclic(groups=None)
    assert found["codasca", "creditcard"].recipe.participation == Full()
    central = found["central", "creditcard-mlp"]
    assert (central.preparation.partition, central.model) == (IID(clients=1), MLP(hidden=(64,)))
    # 48 clients of 16 local steps.
    assert (central.recipe.local_steps, central.recipe.method) == (768, "fedavg")


@pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)
def test_figures_vary_one_thing_at_equal_cost(scale: Scale) -> None:
    """Figure 1 has the same local steps in all; figure 3 and the other one of intervals have the same rounds."""
    interval = configs(scale, build_tables(scale)["figure1"]).values()
    assert {config.recipe.cycles * config.recipe.local_steps for config in interval} == {
        scale.cycles * scale.local_steps
    }
    longer = configs(scale, build_tables(scale)["intervals"]).values()
    assert {config.recipe.cycles for config in longer} == {scale.cycles}
    ends = {scale.intervals[0], scale.local_steps, scale.intervals[-1]}
    assert {config.recipe.local_steps for config in longer} == ends
    rounds: dict[str, set[int]] = {}
    for (_, column), config in configs(scale, build_tables(scale)["figure3"]).items():
        schedule = config.recipe.participation
        assert isinstance(schedule, Cyclic)
        # Clients may have groups of their own, as hours have; their number is another.
        assert (schedule.per_round, schedule.assignment) == (1, "random")
        rounds.setdefault(column.rpartition("-")[0], set()).add(config.recipe.cycles * (schedule.groups or 0))
    usual = scale.cycles * scale.groups
    # The hours of card fraud have eight groups of their own.
    fraud = 8 * scale.cycles if scale.published else usual
    assert rounds == {"cifar10": {usual}, "cifar100": {usual}, "creditcard": {fraud}, "creditcard-mlp": {fraud}}


def test_sheets_share_the_runs_they_have_in_common() -> None:
    """Table 1 serves the traffic table, I = 16 of figure 1 and M = 10 of figure 2: such runs are done once.

    Stand-ins, with few positives, reach nothing that would say anything.
    """
    first = configs(PAPER, build_tables(PAPER)["table1"])
    known = {key: config for key, config in first.items() if not key[1].endswith("stand-in")}
    assert known.items() <= configs(PAPER, build_tables(PAPER)["traffic"]).items()
    ours = first["cycp-minimax", "cifar10"]
    assert configs(PAPER, build_tables(PAPER)["figure1"])["cycp-minimax", "cifar10-I16"] == ours
    assert configs(PAPER, build_tables(PAPER)["figure2"])["cycp-minimax", "cifar10-M10"] == ours
    fraud = configs(PAPER, build_tables(PAPER)["creditcard"])["cycp-minimax", "creditcard"]
    assert configs(PAPER, build_tables(PAPER)["figure1"])["cycp-minimax", "creditcard-I16"] == fraud
    assert configs(PAPER, build_tables(PAPER)["figure2"])["cycp-minimax", "creditcard-M6"] == fraud
    points = {
        column.name
        for name in ("figure1", "figure2", "figure3")
        for column in build_tables(PAPER)[name].columns
        if column.tested
    }
    assert {point.rpartition("-")[2] for point in points} == {"I16", "M10", "M6"}


def test_an_interval_has_the_learning_rate_of_figure_1_whatever_its_rounds() -> None:
    """Each interval but a table's own is tuned in figure 1, and not again at other rounds."""
    jobs = {
        name: {TuningJob.for_cell(cell) for cell in list_cells(build_tables(PAPER)[name])}
        for name in ("figure1", "intervals")
    }
    assert jobs["intervals"] <= jobs["figure1"]
    datasets = ("cifar10", "cifar100", "creditcard", "creditcard-mlp")
    points = {f"{dataset}-I{steps}" for dataset in datasets for steps in (4, 64)}
    assert {job.column for job in jobs["intervals"]} == {"", *points}


def test_the_short_interval_is_a_point_of_figure_1_whose_rows_are_tested() -> None:
    """Its cyclic rows share the runs and the tuning of that point."""
    figure, table = (build_tables(PAPER)[name] for name in ("figure1", "short-interval"))
    assert [column.name for column in table.columns] == ["creditcard-I4", "creditcard-mlp-I4"]
    for cell in [cell for cell in list_cells(table) if cell.row.name == "cycp-pairwise"]:
        point = next(
            each for each in list_cells(figure) if (each.row, each.column.name) == (cell.row, cell.column.name)
        )
        assert TuningJob.for_cell(cell) == TuningJob.for_cell(point)
        assert cell_configs(PAPER, cell, {}, [0]) == cell_configs(PAPER, point, {}, [0])
        assert (cell.column.tested, point.column.tested) == (True, False)


def test_the_seven_surrogates_are_all_there() -> None:
    found = configs(PAPER, build_tables(PAPER)["surrogates"])
    names = {config.recipe.algorithm.objective.name for config in found.values()}
    pairwise = {"square", "squared-hinge", "pairwise-logistic", "sigmoid", "barrier-hinge", "qnorm-hinge"}
    assert names == {"minimax", *pairwise}


def test_a_row_of_one_name_is_one_row_everywhere() -> None:
    """Choices are kept by name."""
    known: dict[str, Row] = {}
    for table in build_tables(PAPER).values():
        for entry in table.rows:
            assert known.setdefault(entry.name, entry) == entry


def test_every_cell_fits_its_data() -> None:
    """Groups, cohorts and models agree with the synthetic rows of the smoke scale; every seed makes other groups."""
    load, seen = DataCache(), set[Config]()
    for table in build_tables(SMOKE).values():
        for cell in list_cells(table):
            seen |= {config for case in cell_configs(SMOKE, cell, {}, [0]) for config in case}
    # Runs on the same data one after another, since the loader keeps the last.
    for config in sorted(seen, key=lambda config: str((config.data, config.preparation, config.data_seed))):
        assemble_run(config, load)


def test_what_was_tuned_is_used_and_a_column_wins_over_it() -> None:
    cell = next(cell for cell in list_cells(build_tables(PAPER)["figure1"]) if cell.column.name == "cifar10-I64")
    ((config,),) = cell_configs(PAPER, cell, {"learning-rate": "0.3", "local-steps": "1"}, [7])
    assert (config.recipe.learning_rate, config.recipe.local_steps, config.recipe.seed) == (0.3, 64, 7)


def test_a_sheet_is_narrowed_to_what_is_named() -> None:
    sheet = build_tables(PAPER)["table1"]
    usual = sheet.select([], [])
    assert [column.name for column in usual.columns] == ["cifar10", "cifar100", "chestmnist", "insurance"]
    assert [entry.name for entry in usual.rows] == list(METHODS)
    named = sheet.select(["chest-stand-in"], ["cycp-minimax"])
    assert [column.name for column in named.columns] == ["chest-stand-in"]
    assert named.rows == (Row("cycp-minimax", "cycp-minimax"),)
    with pytest.raises(ValueError, match="unknown column of table1 'cifar': did you mean 'cifar10'"):
        sheet.select(["cifar"], [])
    with pytest.raises(ValueError, match="unknown method of table1"):
        sheet.select([], ["square"])


def test_every_dataset_has_rows_of_its_own_at_the_smoke_scale() -> None:
    assert list(SMOKE.datasets) == list(PAPER.datasets)
    assert len({SMOKE.build_config(name, "cycp-fedavg", {}).data for name in SMOKE.datasets}) == len(SMOKE.datasets)


def test_what_a_method_changes_on_a_dataset_wins_over_the_dataset_and_yields_to_what_is_asked() -> None:
    scale = replace(PAPER, method_options={"cifar10": {"cycp-pairwise": {"positives": "4", "negatives": "28"}}})
    batch = {
        (dataset, method): scale.build_config(
            dataset, method, {"negatives": "9"} if dataset == "cifar100" else {}
        ).recipe
        for dataset in ("cifar10", "cifar100")
        for method in ("cycp-pairwise", "cycp-fedavg")
    }
    sizes = {key: (recipe.positives, recipe.negatives) for key, recipe in batch.items()}
    assert sizes == {
        ("cifar10", "cycp-pairwise"): (4, 28),
        ("cifar10", "cycp-fedavg"): (16, 16),
        ("cifar100", "cycp-pairwise"): (16, 9),
        ("cifar100", "cycp-fedavg"): (16, 9),
    }
    asked = scale.build_config("cifar10", "cycp-pairwise", {"positives": "2"}).recipe
    assert (asked.positives, asked.negatives) == (2, 28)


def test_the_steps_towards_the_paper_end_with_its_preset() -> None:
    """Each row of `as-printed` differs from the row above in one ingredient, and the last one is the preset."""
    rows = {row.name: row for row in build_tables(PAPER)["as-printed"].rows}
    for dataset in ("cifar10", "creditcard"):
        recipes: dict[str, Any] = {
            name: PAPER.build_config(dataset, row.method, row.settings).recipe for name, row in rows.items()
        }
        for method in ("cycp-fedavg", "cycp-minimax", "cycp-pairwise"):
            assert rows[f"{method}-ours"].grid == ""
            assert rows[f"{method}-grid"].grid == rows[f"{method}-as-printed"].grid == "steps:3x"
            assert recipes[f"{method}-ours"] == recipes[f"{method}-grid"]
            printed = recipes[f"{method}-as-printed"]
            assert name_preset(method, printed) == "as-printed"
            # The number of cycles, the groups and weight decay are the scale's.
            assert printed.algorithm.weight_decay == recipes[f"{method}-ours"].algorithm.weight_decay
            assert (printed.cycles, printed.participation) == (100, recipes[f"{method}-ours"].participation)
        last, printed = recipes["cycp-minimax-weighting"], recipes["cycp-minimax-as-printed"]
        assert replace(last, algorithm=printed.algorithm) == printed
        last, printed = recipes["cycp-pairwise-batches"], recipes["cycp-pairwise-as-printed"]
        assert replace(last, weighting="paper") == printed
        last, printed = recipes["cycp-fedavg-averaging"], recipes["cycp-fedavg-as-printed"]
        assert replace(last, stages=Constant(), weighting="paper") == printed
        assert recipes["cycp-minimax-decay"].stages == Geometric(initial=10, decay=0.5, scale=2.0)


def test_a_row_may_have_a_grid_of_its_own() -> None:
    """Its budget may be given in runs of full length: 3 of 100 cycles, or of the smoke scale's 3."""
    row = Row.parse("mine=fedavg,grid=steps:3x,local-steps=3")
    assert (row.grid, row.settings) == ("steps:3x", {"local-steps": "3"})
    column = build_tables(PAPER)["table1"].columns[0]
    assert (CellSpec(row, column).grid, CellSpec(Row("a", "fedavg"), column).grid) == ("steps:3x", "full")
    assert TuningPlan.parse("steps:3x", PAPER) == ("steps", 300)
    assert TuningPlan.parse("steps:3x", SMOKE) == ("steps", 9)
