"""Runs of one shape that share a graph: each is what it would be alone, to the bit, interrupted or not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from cli_helpers import fedauc
from every_cycle import every_cycle  # noqa: F401
from fedauc.engines.cuda.engine import MAX_LANES, GraphedEngine, SharedGraph
from fedauc.experiments.comparison import Comparison
from fedauc.experiments.config import Config
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.run_group import plan_run_groups
from fedauc.experiments.run_loop import Observer, Progress
from fedauc.experiments.runner import DataCache, Run
from fedauc.experiments.sweep import expand_sweep, read_varied

DATA = {"data": "synthetic", "data.clients": "6", "data.rows-per-client": "30"}

SMALL = {"cycles": "3", "local-steps": "2", "participation.groups": "3", "dtype": "float64", "engine": "graphed"}
"""Three groups of two clients; three cycles are 9 rounds, and 12 with a cycle of scoring rounds."""


def typed_options(texts: Mapping[str, str]) -> list[str]:
    """Options as a user types them."""
    flags = {option: f"--{option.replace('participation.groups', 'groups')}" for option in texts}
    return [word for option, text in texts.items() for word in (flags[option], text)]


TYPED = typed_options(DATA | SMALL)


def expand_runs(methods: str, seeds: int, *vary: str, **changes: str) -> dict[str, Config]:
    """Changes are options, with __ for the dot and _ for the dash."""
    varied = read_varied(vary, {})
    texts = DATA | SMALL | {name.replace("__", ".").replace("_", "-"): text for name, text in changes.items()}
    return expand_sweep(
        methods.split(","), range(seeds), varied, {o: text for o, text in texts.items() if o not in varied}
    )


def ignore_progress(name: str) -> Observer:
    return lambda progress: None


def read_files(folder: Path) -> dict[str, bytes]:
    """Every file of a run but its seconds, and the manifest, which has their hash."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("timing.jsonl", "manifest.json")
    }


@pytest.fixture
def train_alone(tmp_path: Path) -> Callable[[Config], dict[str, bytes]]:
    """The files of a run by itself."""

    def go(config: Config) -> dict[str, bytes]:
        folder = tmp_path / "alone" / str(len(list(tmp_path.glob("alone/*"))))
        Run.create(config, folder).train_to_end()
        return read_files(folder)

    return go


@pytest.fixture
def shared_visits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many runs each visit had places for, and how many of them took part."""
    counts: list[tuple[int, int]] = []
    visit = SharedGraph.visit

    def spy(self: SharedGraph, visits: list[object]) -> object:
        counts.append((len(visits), sum(visit is not None for visit in visits)))
        return visit(self, visits)  # type: ignore[arg-type]

    monkeypatch.setattr(SharedGraph, "visit", spy)
    return counts


SHARING: Mapping[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "a pool of scores": ("cycp-pairwise", ("learning-rate=0.03,0.1",), {}),
    "client states": ("a-scaffold", ("learning-rate=0.03,0.1",), {}),
    "a stage's mean": (
        "cycp-pairwise",
        ("learning-rate=0.03,0.1",),
        {"stage-output": "cycle_mean", "stages": "geometric"},
    ),
    "other data": ("cycp-minimax", ("data-seed=0,1",), {}),
    "other cohorts": ("cycp-minimax,rs-minimax", (), {"participation__per_round": "1"}),
}


def write_images(path: Path) -> dict[str, str]:
    """Sixty 8 x 8 images of six clients, a little brighter where the label is 1."""
    labels = np.arange(60) % 3 == 0
    noise = np.random.default_rng(0).integers(0, 200, size=(60, 1, 8, 8))
    pixels = (noise + 40 * labels[:, None, None, None]).astype(np.uint8)
    np.savez(path, allow_pickle=False, x=pixels, y=labels, client=np.arange(60) // 10)
    return {"data": "table", "data.path": str(path), "data.standardize": "false"}


@pytest.mark.parametrize("case", SHARING)
def test_runs_that_share_a_graph_are_what_they_are_alone(
    tmp_path: Path, train_alone: Callable[[Config], dict[str, bytes]], shared_visits: list[tuple[int, int]], case: str
) -> None:
    methods, vary, changes = SHARING[case]
    configs = expand_runs(methods, 2, *vary, **changes)
    assert Comparison.create(tmp_path / "sweep", configs).train_runs(ignore_progress) == {}
    # Two seeds of two settings: every visit is one of four; of two, where clients have states.
    assert shared_visits
    assert set(shared_visits) == ({(2, 2)} if case == "client states" else {(4, 4)})
    for name, config in configs.items():
        assert read_files(tmp_path / "sweep" / name) == train_alone(config)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["cycp-pairwise", "a-scaffold"])
def test_runs_that_share_a_cuda_graph_are_what_they_are_alone(tmp_path: Path, method: str) -> None:
    """In float64; 1e-9 leaves room for sums in another order."""
    configs = expand_runs(method, 2, "learning-rate=0.03,0.1", device="cuda")
    sweep = Comparison.create(tmp_path / "sweep", configs)
    assert sweep.train_runs(ignore_progress) == {}
    for number, (name, config) in enumerate(configs.items()):
        Run.create(config, tmp_path / str(number)).train_to_end()
        shared_records, alone_records = (
            RunFolder(path).read_records() for path in (sweep.path / name, tmp_path / str(number))
        )
        assert len(shared_records) == 3
        for record, expected in zip(shared_records, alone_records, strict=True):
            assert record == pytest.approx(expected, rel=1e-9)


def test_rounds_that_nobody_comes_to_are_waited_out(
    tmp_path: Path, train_alone: Callable[[Config], dict[str, bytes]], shared_visits: list[tuple[int, int]]
) -> None:
    """Two traces of two rounds a cycle: nobody comes to round 1 of the first and round 2 of the second; none to 3."""
    for name, rounds in (("a", (0, 2, 4, 5)), ("b", (0, 1, 4, 5))):
        rows = "".join(f"{round},{round % 2}\n{round},{4 + round % 2}\n" for round in rounds)
        (tmp_path / f"{name}.csv").write_text("round,client\n" + rows)
    texts = {option: text for option, text in (DATA | SMALL).items() if option != "participation.groups"}
    texts |= {"participation": "trace", "participation.cycle-length": "2"}
    varied = {"participation.path": [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]}
    configs = expand_sweep(["cycp-minimax"], [0], varied, texts)
    Comparison.create(tmp_path / "sweep", configs).train_runs(ignore_progress)
    assert shared_visits == [(2, 2), (2, 1), (2, 1), (2, 2), (2, 2)]
    for name, config in configs.items():
        assert read_files(tmp_path / "sweep" / name) == train_alone(config)


@pytest.mark.parametrize("empty", [1, 2])
def test_nobody_may_come_to_the_first_rounds(tmp_path: Path, empty: int) -> None:
    """Two seeds of a trace that begins with an empty round, or a whole cycle of them, are one group."""
    rows = "".join(f"{round},{round % 2}\n" for round in range(empty, 6))
    (tmp_path / "late.csv").write_text("round,client\n" + rows)
    texts = {option: text for option, text in (DATA | SMALL).items() if option != "participation.groups"}
    texts |= {"participation": "trace", "participation.cycle-length": "2", "participation.path": f"{tmp_path}/late.csv"}
    assert group_sizes(plan_run_groups(expand_sweep(["cycp-minimax"], range(2), {}, texts), DataCache())) == [2]


def test_other_cycles_of_as_many_rounds_share_and_wait_for_each_others_scores(
    tmp_path: Path, train_alone: Callable[[Config], dict[str, bytes]], shared_visits: list[tuple[int, int]]
) -> None:
    """Twelve rounds in two stages, one client each, and before each stage a cycle of scores: of 1, 2 or 3 rounds."""
    changes = {
        "participation__per_round": "1",
        "stage-output": "cycle_mean",
        "stages": "milestones",
        "stages__at": "0.5",
    }
    configs = {
        f"{name}-{groups}": config
        for groups in (1, 2, 3)
        for name, config in expand_runs(
            "cycp-pairwise", 1, cycles=str(12 // groups), participation__groups=str(groups), **changes
        ).items()
    }
    assert len(plan_run_groups(configs, DataCache())) == 1
    Comparison.create(tmp_path / "sweep", configs).train_runs(ignore_progress)
    assert shared_visits == ([(3, 3), (3, 2), (3, 1)] + [(3, 3)] * 6) * 2
    for name, config in configs.items():
        assert read_files(tmp_path / "sweep" / name) == train_alone(config)


class Stop(Exception):
    """Someone pressed a key."""


@pytest.mark.usefixtures("every_cycle")
@pytest.mark.parametrize("moment", [(0, 6), (1, 9), (2, 4), (0, 12)])
def test_an_interrupted_sweep_resumes_to_the_same_bits(
    tmp_path: Path,
    train_alone: Callable[[Config], dict[str, bytes]],
    shared_visits: list[tuple[int, int]],
    moment: tuple[int, int],
) -> None:
    """After some round of some run, where the runs after it may have one checkpoint less."""
    configs, (stopped_run, round) = expand_runs("cycp-pairwise", 3), moment
    sweep = Comparison.create(tmp_path / "sweep", configs)

    def observer(name: str) -> Observer:
        def observe(progress: Progress) -> None:
            if (name, progress.done) == (list(configs)[stopped_run], round):
                raise Stop

        return observe

    with pytest.raises(Stop):
        sweep.train_runs(observer)
    before = len(shared_visits)
    for name in list(configs)[stopped_run + 1 :] if round % 3 == 0 else []:
        sorted((sweep.path / name / "checkpoints").iterdir())[-1].unlink()
    assert Comparison(sweep.path).train_runs(ignore_progress) == {}
    if moment == (1, 9):
        # Two runs have saved round 9, the third goes on from round 6: three rounds together, then three by itself.
        assert shared_visits[before:] == [(3, 3)] * 3 + [(3, 1)] * 3
    for name, config in configs.items():
        assert read_files(sweep.path / name) == train_alone(config)


def test_a_run_that_stops_leaves_the_others_going(
    tmp_path: Path, train_alone: Callable[[Config], dict[str, bytes]], shared_visits: list[tuple[int, int]]
) -> None:
    """At learning rate 0.3 unbounded scores diverge in the second cycle; their neighbours do not notice."""
    configs = expand_runs("cycp-minimax", 2, "learning-rate=0.01,0.3", objective__score="identity")
    stop_flags = dict[str, list[bool]]()

    def observer(name: str) -> Observer:
        return lambda progress: stop_flags.setdefault(name, []).append(progress.stopped)

    stopped = Comparison.create(tmp_path / "sweep", configs).train_runs(observer)
    diverging = {name for name in configs if "learning-rate=0.3" in name}
    assert set(stopped) == diverging
    # The observer of a stopped run hears of it in its last call, and only then.
    assert {name for name, flags in stop_flags.items() if flags[-1]} == diverging
    assert all(not any(flags[:-1]) for flags in stop_flags.values())
    assert shared_visits[0] == (4, 4)
    assert shared_visits[-1] == (4, 2)
    for name, config in configs.items():
        folder = tmp_path / "sweep" / name
        if name in diverging:
            assert (folder / "stopped.txt").read_text().strip() == stopped[name]
            assert not (folder / "result.json").exists()
        else:
            assert read_files(folder) == train_alone(config)


def test_the_seconds_of_runs_that_share_add_up_to_the_clock(tmp_path: Path) -> None:
    sweep, begin = Comparison.create(tmp_path / "sweep", expand_runs("cycp-fedavg", 3)), time.perf_counter()
    sweep.train_runs(ignore_progress)
    total = time.perf_counter() - begin
    seconds = [folder.training_seconds() for _, folder in sweep.run_folders()]
    # Each run is charged at least some of it; none all of it, as it would be if each counted the others' time.
    assert 0 < sum(seconds) < total


def group_sizes(groups: list[list[str]]) -> list[int]:
    return sorted(map(len, groups))


GROUPS = {
    "seeds, learning rates, data and schedules share": (
        ("cycp-minimax,rs-minimax", 2, "learning-rate=0.1,1", "data-seed=0,1"),
        {},
        [16],
    ),
    "weights of rows share": (("cycp-minimax", 1, "weighting=clients,pooled"), {}, [2]),
    "another algorithm does not": (("cycp-minimax,cycp-fedavg", 2), {}, [2, 2]),
    "another parameter of the loss does not": (("cycp-pairwise", 2, "objective.scale=0.5,1"), {}, [2, 2]),
    "another number of steps does not": (("cycp-minimax", 2, "local-steps=1,2"), {}, [2, 2]),
    "another batch does not": (("cycp-minimax", 2, "positives=4,8"), {}, [2, 2]),
    "another length does not": (("cycp-minimax", 2, "cycles=2,3"), {}, [2, 2]),
    "another number of stages does not": (("cycp-minimax", 2, "stages=constant,milestones"), {}, [2, 2]),
    "another number of rounds does not": (("cycp-minimax", 2, "participation.groups=2,3"), {}, [2, 2]),
    "another pass of scores shares": (
        ("cycp-pairwise", 2, "stage-output=last,cycle_mean"),
        {"stages": "geometric", "stages__initial": "1"},
        [4],
    ),
    "cohorts of half the size do not": (("cycp-minimax", 2, "participation.per-round=1,2"), {}, [2, 2]),
    "cohorts of nearly the same size share": (
        ("cycp-minimax", 2, "participation.per-round=3,4"),
        {"participation__groups": "1"},
        [4],
    ),
    "another model does not": (("cycp-minimax", 2, "model=linear,mlp"), {}, [2, 2]),
    "another float does not": (("cycp-minimax", 2, "dtype=float32,float64"), {}, [2, 2]),
    "other engines go alone": (("cycp-minimax", 2, "engine=batched,loop"), {}, [1, 1, 1, 1]),
    # Two clients a round: 33 runs of 2 are more than 64 lanes, which hold ten stacks of three.
    "as many as there are lanes": (("cycp-fedavg", MAX_LANES // 2 + 1), {}, [3, 30]),
    "three at most with a state per client, and none alone": (("a-scaffold", 4), {}, [2, 2]),
}


@pytest.mark.parametrize("case", GROUPS)
def test_who_shares_a_graph(case: str) -> None:
    (methods, seeds, *vary), changes, expected = GROUPS[case]
    configs = expand_runs(str(methods), int(seeds), *map(str, vary), **changes)
    groups = plan_run_groups(configs, DataCache())
    assert group_sizes(groups) == expected
    assert sorted(name for group in groups for name in group) == sorted(configs)


def test_the_seeds_of_a_comparison_share_a_graph(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, shared_visits: list[tuple[int, int]]
) -> None:
    named = ("--methods", "cycp-fedavg,cycp-minimax", "--seeds", "0,1,2")
    assert fedauc(capsys, "compare", *TYPED, *named, "--out", str(tmp_path / "both")).code == 0
    # Two methods, 9 rounds each.
    assert shared_visits == [(3, 3)] * 18


def test_runs_share_the_rows_they_train_on(tmp_path: Path) -> None:
    """Each split is there once, in the recipe's type, and is let go when no run uses it."""
    cache, made_runs = DataCache(), []
    for number, config in enumerate(expand_runs("cycp-fedavg", 2, "data-seed=0,1").values()):
        made_runs.append(Run.create(config, tmp_path / str(number), cache))
    rows = []
    for run in made_runs:
        engine = run.assembly.training.engine
        assert isinstance(engine, GraphedEngine)
        rows.append(engine.client_rows.inputs.data_ptr())
    assert rows[0] == rows[1] != rows[2] == rows[3]
    first, last = made_runs[0].config, made_runs[3].config
    latest, first_data = cache.prepare_data(last), id(made_runs[0].data)
    assert latest is made_runs[3].data
    assert id(cache.prepare_data(first)) == first_data
    cache.prepare_data(last)
    del made_runs, run, engine
    assert cache.prepare_data(last) is latest
    assert list(cache._used.values()) == [latest]


def test_a_sweep_prints_its_settings_by_validation_auc(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "sweep")
    vary = ("--vary", "lr=0.03,1", "--vary", "objective.scale=0.5,1")
    ran = fedauc(capsys, "sweep", *TYPED, "--method", "cycp-pairwise", "--seeds", "0,1", *vary, "--out", out)
    assert ran.code == 0, ran.err
    assert "Sorted by validation AUC" in ran.out
    *lines, command = ran.out.splitlines()
    assert max(map(len, lines)) <= 80
    shown = json.loads(fedauc(capsys, "show", out, "--json").out)
    # Two learning rates, two scales, two seeds.
    assert len(shown) == 8
    means = {}
    for setting in dict.fromkeys(run["setting"] for run in shown):
        runs = [run for run in shown if run["setting"] == setting]
        means[setting] = np.mean([[run["best"]["validation_auc"], run["final"]["auc"]] for run in runs], axis=0)
    ranked = sorted(means, key=lambda setting: -means[setting][0])
    table = (tmp_path / "sweep" / "table.md").read_text().splitlines()
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table[2:6]]
    assert [row[0] for row in rows] == [setting.replace("/", " ") for setting in ranked]
    for row, setting in zip(rows, ranked, strict=True):
        judged, final = (float(cell.split(" ± ")[0]) for cell in row[2:4])
        # Printed with four digits.
        assert (judged, final) == pytest.approx(tuple(means[setting]), abs=5e-5)
    assert {row[1] for row in rows} == {"2"}
    config = f"{out}/{ranked[0]}/seed-0/config.json"
    assert command == f"Train the best setting again: fedauc run --config {config} --out {out}-best"
    assert table[-1] == command
    assert Config.read(Path(config)).recipe.seed == 0
    again = fedauc(capsys, "resume", out)
    assert (again.code, again.out) == (0, ran.out)
    assert fedauc(capsys, "show", out).out == ran.out


def test_without_a_validation_part_a_sweep_says_that_it_sorts_by_test_auc(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chosen = ("--method", "cycp-fedavg", "--model", "small-cnn", "--vary", "lr=0.01,0.1")
    data = typed_options(SMALL | write_images(tmp_path / "images.npz"))
    ran = fedauc(capsys, "sweep", *data, *chosen, "--out", str(tmp_path / "sweep"))
    assert ran.code == 0, ran.err
    assert "Sorted by test AUC" in ran.out
    assert "not for reporting" in " ".join(ran.out.split())


def test_a_sweep_says_which_runs_could_not_go_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chosen = ("--method", "cycp-minimax", "--score", "identity", "--weighting", "clients", "--vary", "lr=0.3,0.01")
    ran = fedauc(capsys, "sweep", *TYPED, *chosen, "--out", str(tmp_path / "sweep"))
    assert ran.code == 3
    assert "cycp-minimax/learning-rate=0.3/seed-0: stopped in round 3" in ran.err
    lines = ran.out.splitlines()
    assert lines[1].split()[:3] == ["cycp-minimax", "learning-rate=0.01", "1"]
    # What never finished has no numbers, even if it has records, and comes last.
    assert (tmp_path / "sweep/cycp-minimax/learning-rate=0.3/seed-0/records.jsonl").is_file()
    assert lines[2].split() == ["cycp-minimax", "learning-rate=0.3", "0", "of", "1", "-", "-", "-"]


def test_the_plan_of_a_sweep_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chosen = ("--methods", "cycp-minimax,cycp-fedavg", "--vary", "algorithm.prox=0,0.1", "--plan")
    ran = fedauc(capsys, "sweep", *TYPED, *chosen)
    assert ran.code == 0, ran.err
    # The proximal weight is Minimax's alone; it is part of the step, so nothing is shared.
    assert ran.out.splitlines() == [
        "3 runs: 0 in shared graphs, 3 alone",
        "alone:",
        "  cycp-minimax/algorithm.prox=0/seed-0",
        "  cycp-minimax/algorithm.prox=0.1/seed-0",
        "  cycp-fedavg/seed-0",
    ]
    assert list(tmp_path.iterdir()) == []
    lacking = fedauc(capsys, "sweep", *TYPED, *chosen[:-1])
    assert (lacking.code, "sweep lacks --out" in lacking.err) == (2, True)


def test_a_parameter_is_varied_only_where_it_belongs() -> None:
    configs = expand_runs("cycp-pairwise", 1, "objective=sigmoid,square", "objective.scale=0.5,1")
    assert list(configs) == [
        "cycp-pairwise/objective=sigmoid/objective.scale=0.5/seed-0",
        "cycp-pairwise/objective=sigmoid/objective.scale=1/seed-0",
        "cycp-pairwise/objective=square/seed-0",
    ]


BAD = {
    "unknown option": (["--vary", "learning-rat=1,2"], ["learning-rat", "did you mean 'learning-rate'"]),
    "unknown method": (["--methods", "fedavgg"], ["fedavgg", "fedavg"]),
    "nobody's option": (["--method", "fedavg", "--vary", "algorithm.prox=0,1"], ["algorithm.prox", "not a parameter"]),
    "no value": (["--vary", "learning-rate="], ["vary learning-rate", "''", "at least 1"]),
    "no list": (["--vary", "learning-rate"], ["'learning-rate'", "option=value"]),
    "no option": (["--vary", "=1,2"], ["'=1,2'", "option=value"]),
    "a value twice": (["--vary", "learning-rate=0.1,0.1"], ["0.1,0.1", "once"]),
    "a value in two spellings": (
        ["--vary", "learning-rate=0.1,0.10"],
        ["learning-rate=0.1/", "learning-rate=0.10/", "same run"],
    ),
    "an option twice": (["--vary", "learning-rate=1", "--vary", "lr=2"], ["learning-rate", "twice"]),
    "fixed and varied": (["--vary", "groups=2,3"], ["--groups", "3", "varied too"]),
    "a bad value": (["--vary", "learning-rate=1,-1"], ["--learning-rate", "-1", "above 0"]),
    "folders of one name": (["--data", "table", "--vary", "data.path=a/b.csv,a:b.csv"], ["path=a-b.csv", "folder"]),
    "seeds elsewhere": (["--vary", "seed=1,2"], ["--seeds 1,2"]),
    "a seed": (["--seed", "1"], ["--seeds 1"]),
    "no seeds": (["--seeds", ","], ["seeds", "','", "0,1,2"]),
    "a seed twice": (["--seeds", "1,01"], ["1,01", "once"]),
    "seeds that are none": (["--seeds", "a"], ["'a'", "whole numbers"]),
    "what does not fit": (["--vary", "participation.per-round=1,5"], ["5", "2"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_sweep_is_one_line_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, case: str
) -> None:
    arguments, expected = BAD[case]
    outcome = fedauc(capsys, "sweep", *TYPED, *arguments, "--out", str(tmp_path / "deep" / "sweep"))
    message = outcome.err.strip().splitlines()[-1]
    assert (outcome.code, outcome.err.count("error: ")) == (2, 1), outcome.err
    assert all(word in message for word in expected), message
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_list_of_runs_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for content in ("{", "{}", '{"runs": []}'):
        (tmp_path / "comparison.json").write_text(content)
        outcome = fedauc(capsys, "show", str(tmp_path))
        assert (outcome.code, "comparison.json is damaged" in outcome.err) == (2, True)


def test_what_the_server_alone_reads_does_not_part_runs(
    tmp_path: Path, train_alone: Callable[[Config], dict[str, bytes]], shared_visits: list[tuple[int, int]]
) -> None:
    """Two amplifications and plain FedAvg take one step at the clients, and keep their own servers."""
    configs = {**expand_runs("a-fedavg", 1, "algorithm.amplify=1.5,3"), **expand_runs("cycp-fedavg", 1)}
    Comparison.create(tmp_path / "both", configs).train_runs(ignore_progress)
    assert set(shared_visits) == {(3, 3)}
    for name, config in configs.items():
        assert read_files(tmp_path / "both" / name) == train_alone(config)
    pools = {**expand_runs("cycp-pairwise", 1), **expand_runs("rs-pairwise", 1)}
    assert len(plan_run_groups(pools, DataCache())) == 1
    scales = expand_runs("cycp-pairwise", 1, "objective.scale=1,0.5")
    assert len(plan_run_groups(scales, DataCache())) == 2
