"""The command line: what a user types, sees, and gets told."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from cli_helpers import fedauc
from fedauc.algorithms import find_methods
from fedauc.cli.training import LISTS
from fedauc.engines import _log_loop_choice, engines, loop
from fedauc.experiments.config import FORMAT
from fedauc.experiments.options import list_options
from fedauc.experiments.recipe import ENGINES
from fedauc.experiments.registration import list_kinds

TINY = (
    *("--data", "synthetic", "--data.clients", "6", "--data.rows-per-client", "30"),
    *("--cycles", "2", "--local-steps", "2"),
)

PAPER_METHODS = {
    "cycp-minimax",
    "cycp-pairwise",
    "rs-minimax",
    "rs-pairwise",
    "cycp-fedavg",
    "a-fedavg",
    "a-scaffold",
    "fedavg",
    "scaffold",
    "coda-plus",
    "codasca",
    "fedxl1",
}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


OTHER_METHODS = {
    *("cycp-average-precision", "cycp-ndcg", "cycp-partial-auc", "cycp-two-way-partial-auc"),
    *("cycp-fedadam", "cycp-fedavg-balanced", "cycp-fedavg-focal", "cycp-fedavg-logit-adjusted"),
    "cycp-local-pairs",
    "focus",
}
"""Methods that the paper does not have: for other metrics, for class balance, without pairs of clients, and for
participation."""


def test_the_methods_are_named_as_in_the_paper() -> None:
    assert set(find_methods()) - OTHER_METHODS == PAPER_METHODS


def test_run_makes_a_folder_that_show_can_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    ran = fedauc(capsys, "run", "--method", "cycp-minimax", *TINY, "--groups", "3", "--out", str(out))
    assert ran.code == 0, ran.err
    summary = json.loads(fedauc(capsys, "show", str(out), "--json").out)
    # 2 cycles of 3 groups, 2 clients each: 6 rounds, 12 visits.
    assert (summary["status"], summary["rounds"], summary["visits"]) == ("done", 6, 12)
    # 10 weights, a bias and (a, b, α): 14 float32 values each way per visit, and no proximal reference.
    assert summary["bytes_up"] == summary["bytes_down"] == 12 * 14 * 4
    assert summary["final"]["low"] < summary["final"]["auc"] < summary["final"]["high"]
    assert summary["best"]["auc"] >= summary["final"]["auc"] or summary["best_by"] == "validation_auc"
    text = fedauc(capsys, "show", str(out)).out
    assert f"{summary['final']['auc']:.4f}" in text
    assert {"config.json", "environment.json", "records.jsonl", "model.pt"} <= files(out)


def test_compare_writes_a_table_and_curves(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "both"
    named = ("--methods", "cycp-fedavg,cycp-pairwise", "--seeds", "0,1")
    assert fedauc(capsys, "compare", *named, *TINY, "--out", str(out)).code == 0
    assert (out / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert (out / "table.md").read_text().count("\n") == 4
    assert {"cycp-fedavg/seed-1/result.json", "cycp-pairwise/seed-0/result.json"} <= files(out)
    shown = fedauc(capsys, "show", str(out), "--json")
    assert [run["method"] for run in json.loads(shown.out)] == ["cycp-fedavg"] * 2 + ["cycp-pairwise"] * 2


def test_a_finished_comparison_resumes_to_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "both"
    fedauc(capsys, "compare", "--methods", "cycp-fedavg,fedavg", *TINY, "--out", str(out))
    uninterrupted = (out / "fedavg/seed-0/records.jsonl").read_bytes()
    # As if it had been stopped before the second run had started.
    for path in sorted((out / "fedavg").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (out / "fedavg").rmdir()
    assert fedauc(capsys, "resume", str(out)).code == 0
    assert (out / "fedavg/seed-0/records.jsonl").read_bytes() == uninterrupted


@pytest.mark.parametrize("what", sorted(set(LISTS) - {"engines", "presets"}))
def test_list_names_every_member(capsys: pytest.CaptureFixture[str], what: str) -> None:
    listed = fedauc(capsys, "list", what)
    expected = PAPER_METHODS if what == "methods" else set(list_kinds()[LISTS[what]])
    assert listed.code == 0
    assert expected
    assert expected <= set(listed.out.split())


def test_list_without_a_name_says_which_lists_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    listed = " ".join(fedauc(capsys, "list").out.split())
    assert "cycp-pairwise" in listed
    assert all(what in listed.partition("shows others: ")[2] for what in LISTS if what != "methods")
    assert "shows others" not in fedauc(capsys, "list", "methods").out


def test_list_is_in_alphabetical_order(capsys: pytest.CaptureFixture[str]) -> None:
    for what in LISTS:
        names = [line.split()[0] for line in fedauc(capsys, "list", what).out.splitlines()[1:] if line[0] != " "]
        assert names == sorted(names)
        # There is one callback that a configuration can name, and one preset.
        assert len(names) > 2 or what in ("callbacks", "presets")


def test_every_kind_has_a_list() -> None:
    assert set(LISTS.values()) == {*list_kinds(), "method", "engine", "preset"}


def test_the_engines_are_listed_without_importing_them(capsys: pytest.CaptureFixture[str]) -> None:
    listed = fedauc(capsys, "list", "engines")
    described = {name: (engine.__doc__ or "").splitlines()[0] for name, engine in engines().items()}
    assert {name: text for name, text in ENGINES.items() if name != "auto"} == described
    assert all(" ".join(text.split()[:4]) in listed.out for text in described.values())
    helped = " ".join(fedauc(capsys, "run", "--help").out.replace("│", " ").split())
    assert f"One of {', '.join(['auto', *described])}. Default: auto." in helped


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--lr", "-1"), "--learning-rate is -1.0; it must be a finite number above 0: raise --learning-rate"),
        (("--cycles", "many"), "--cycles is 'many'; it must be a whole number"),
        (("--groups", "0"), "--groups is 0; it must be a whole number of at least 1: raise --groups"),
        (("--groups", "21"), "--groups is 21; it must be at most the 20 non-empty clients: lower --groups"),
        (("--objective.scale", "-1"), "--objective.scale is -1.0; it must be a finite number above 0: raise"),
        (("--precision", "mixed", "--dtype", "float64"), "--precision is 'mixed', but --dtype is 'float64'; mixed"),
        (("--data", "table", "--data.path", "nope.csv"), "--data.path is 'nope.csv', but there is no such file: give"),
        # One name for two options: the message cannot tell which of the two is meant.
        (("--data.positive-rate", "2", "--positive-rate", "0.1"), "positive_rate is 2.0; it must be a number above 0"),
    ],
)
def test_errors_spell_options_as_on_the_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    refused = fedauc(capsys, "run", "--data", "synthetic", *words, "--out", str(tmp_path / "run"))
    assert refused.code == 2
    assert refused.err.startswith(f"error: {message}"), refused.err


@pytest.mark.parametrize("words", [(), ("run",), ("show",), ("federation", "show")])
def test_help_shows_flags_without_a_value(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    helped = fedauc(capsys, *words, "--help")
    assert "--help" in helped.out
    assert "bool" not in helped.out


@pytest.mark.parametrize("command", ["run", "compare", "sweep", "resume", "show", "list"])
def test_help_shows_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    helped = fedauc(capsys, command, "--help")
    assert helped.code == 0
    assert f"Example: fedauc {command}" in " ".join(helped.out.split())


def test_every_field_is_an_option_or_nested(capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON of a run has no leaf without an option, besides the format, the names and tuples of tuples."""
    from fedauc.experiments.config import Config, to_plain
    from fedauc.experiments.recipe import Recipe

    def leaves(tree: object, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
        if isinstance(tree, dict):
            return {leaf for key, value in tree.items() for leaf in leaves(value, (*path, key))}
        return {path}

    known = {option.path for option in list_options()} | {("recipe", "method")}
    paths = leaves(to_plain(Config(recipe=Recipe.of("cycp-pairwise"))))
    named = {path for path in paths if path[-1] == "name"}
    assert paths - named - known == {("recipe", "participation", "given")}


def test_a_configuration_file_gives_the_same_records_as_options(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    chosen = ("--method", "rs-pairwise", "--objective", "squared-hinge", "--lr", "0.02")
    fedauc(capsys, "run", *TINY, *chosen, "--out", str(first))
    again = fedauc(capsys, "run", "--config", str(first / "config.json"), "--out", str(second))
    assert again.code == 0, again.err
    assert (second / "config.json").read_text() == (first / "config.json").read_text()
    assert (second / "records.jsonl").read_bytes() == (first / "records.jsonl").read_bytes()


def test_options_override_a_configuration_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    fedauc(capsys, "run", "--method", "rs-pairwise", *TINY, "--out", str(first))
    changes = ("--method", "a-fedavg", "--seed", "4")
    fedauc(capsys, "run", "--config", str(first / "config.json"), *changes, "--out", str(second))
    recipe = json.loads((second / "config.json").read_text())["recipe"]
    assert (recipe["method"], recipe["algorithm"]["name"]) == ("a-fedavg", "a-fedavg")
    assert (recipe["seed"], recipe["cycles"]) == (4, 2)


def table(path: Path, **changes: np.ndarray) -> str:
    """A small .npz with one array changed."""
    rows = np.arange(40)
    arrays = {"x": np.linspace(-1, 1, 80).reshape(40, 2), "y": rows % 4 == 0, "client": rows // 10} | changes
    np.savez(path, allow_pickle=False, **{key: np.asarray(value) for key, value in arrays.items()})
    return str(path)


NAN = np.where(np.arange(80).reshape(40, 2) == 7, np.nan, 0.5)

BAD_INPUT = {
    "labels": (["--data", "table", "--data.path", "{labels}"], ["2", "0"]),
    "nan": (["--data", "table", "--data.path", "{nan}"], ["nan", "row 3", "column 1"]),
    "no positives": (["--data", "table", "--data.path", "{negative}"], ["positive"]),
    "groups": ([*TINY, "--groups", "7"], ["7", "6"]),
    "per round": ([*TINY, "--groups", "3", "--per-round", "5"], ["5", "2"]),
    "method": (["--method", "cycp-minmax"], ["cycp-minmax", "cycp-minimax"]),
    "objective": (["--objective", "sigmod"], ["sigmod", "sigmoid"]),
    "participation": (["--participation", "cyclical"], ["cyclical", "cyclic"]),
    "data": (["--data", "creditcards"], ["creditcards", "creditcard"]),
    "model": (["--model", "liner"], ["liner", "linear"]),
    "weighting": ([*TINY, "--weighting", "client"], ["client", "clients"]),
    "list twice": (
        [*TINY, "--transforms", "clip", "--transforms=quantize"],
        ["--transforms", "2 times", "separated by commas"],
    ),
    "metrics twice": ([*TINY, "--metrics", "auc", "--metrics", "ap"], ["--metrics", "2 times", "separated by commas"]),
    "foreign parameter": ([*TINY, "--objective.margin", "2"], ["objective.margin", "sigmoid", "scale"]),
    "number": ([*TINY, "--cycles", "many"], ["cycles", "many", "whole number"]),
    "bound": ([*TINY, "--cycles", "0"], ["cycles", "0", "at least 1"]),
    "step": ([*TINY, "--lr", "-1"], ["--learning-rate", "-1", "above 0"]),
    "file": (["--config", "{missing}"], ["does not exist"]),
    "newer": (["--config", "{newer}"], [str(FORMAT + 1), "upgrade"]),
    "older": (["--config", "{older}"], ["format 1", "reads format 2", "start it again"]),
    "not json": (["--config", "{broken}"], ["not JSON"]),
    "unknown field": (["--config", "{typo}"], ["cycels", "cycles"]),
    "kind of objective": ([*TINY, "--method", "cycp-fedavg", "--objective", "sigmoid"], ["sigmoid", "logistic"]),
    "no method": (["--config", "{nameless}"], ["recipe", "method"]),
    "device": ([*TINY, "--device", "tpu"], ["tpu", "cpu"]),
    "engine": ([*TINY, "--engine", "lopp"], ["lopp", "loop"]),
    "unknown option": ([*TINY, "--cycels", "3"], ["--cycels"]),
    "path needed": (["--data", "table"], ["data lacks path", "--data.path"]),
    "a file as parent": ([*TINY, "--out", "{typo}/run"], ["typo"]),
    "too much work": ([*TINY, "--local-steps", "100000000000"], ["--local-steps", "1000000"]),
    "scores for embeddings": ([*TINY, "--objective", "contrastive"], ["contrastive", "at least 2"]),
    "embeddings for scores": ([*TINY, "--model", "mlp", "--model.outputs", "4"], ["4 numbers", "'sigmoid'", "1"]),
    "a trace that ends": (
        [*TINY, "--participation", "trace", "--participation.path", "{trace.csv}", "--participation.cycle-length", "2"],
        ["trace", "1"],
    ),
    "too few test positives": (["--data", "table", "--data.path", "{few}"], ["1", "needed"]),
}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    for name, text in {
        "newer": json.dumps({"format": FORMAT + 1, "recipe": {}}),
        "older": json.dumps({"format": 1, "recipe": {"method": "fedavg", "step_size": 0.1}}),
        "broken": '{"recipe": ',
        "typo": json.dumps({"recipe": {"method": "fedavg", "cycels": 3}}),
        "nameless": json.dumps({"recipe": {"cycles": 3}}),
        "trace.csv": "round,client\n0,1\n1,2\n",
    }.items():
        (inputs / name).write_text(text)
    return {
        "labels": table(inputs / "labels.npz", y=np.arange(40) % 3),
        "nan": table(inputs / "nan.npz", x=NAN),
        "negative": table(inputs / "negative.npz", y=np.zeros(40)),
        "few": table(inputs / "few.npz", y=np.arange(40) < 2),
        **{
            name: str(inputs / name)
            for name in ("missing", "newer", "older", "broken", "typo", "nameless", "trace.csv")
        },
    }


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, places: dict[str, str], case: str
) -> None:
    arguments, expected = BAD_INPUT[case]
    before = files(tmp_path)
    out = tmp_path / "deep" / "out"
    words = [places.get(argument.strip("{}"), argument) if argument[0] == "{" else argument for argument in arguments]
    words = [argument.replace("{typo}", places["typo"]) for argument in words]
    outcome = fedauc(capsys, "run", "--out", str(out), *words)
    message = outcome.err.strip().splitlines()[-1]
    assert outcome.code == 2
    assert message.startswith("error: ")
    assert outcome.err.count("error: ") == 1
    assert all(word in message for word in expected), message
    assert files(tmp_path) == before


def test_an_existing_folder_is_never_written_over(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear")
    for command in (["run"], ["compare", "--methods", "fedavg"], ["sweep", "--vary", "lr=0.1,1"]):
        outcome = fedauc(capsys, *command, *TINY, "--out", str(tmp_path / "mine"))
        assert outcome.code == 2
        assert "exists already" in outcome.err
    assert files(tmp_path) == {"mine", "mine/thesis.txt"}


@pytest.mark.parametrize("cut", [0, 10, 200, -1])
def test_a_truncated_checkpoint_is_named_and_the_one_before_it_works(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, cut: int
) -> None:
    out = tmp_path / "run"
    fedauc(capsys, "run", "--method", "a-scaffold", *TINY, "--out", str(out))
    uninterrupted = (out / "records.jsonl").read_bytes()
    (out / "result.json").unlink()
    last = sorted((out / "checkpoints").iterdir())[-1]
    last.write_bytes(last.read_bytes()[:cut])
    outcome = fedauc(capsys, "resume", str(out))
    assert outcome.code == 2
    assert last.name in outcome.err
    assert (out / "records.jsonl").read_bytes() == uninterrupted
    last.unlink()
    assert fedauc(capsys, "resume", str(out)).code == 0
    assert (out / "records.jsonl").read_bytes() == uninterrupted


def test_resume_and_show_refuse_a_folder_that_is_no_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command in ("resume", "show"):
        outcome = fedauc(capsys, command, str(tmp_path))
        assert (outcome.code, "not a run folder" in outcome.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--method", "cycp-minimax", "--score", "identity", "--lr", "50"], ["round", "learning rate"]),
        (
            ["--method", "cycp-fedavg", "--dtype", "float16", "--lr", "6e4"],
            ["NaN or infinite", "round", "learning rate"],
        ),
        (["--method", "cycp-pairwise", "--score", "sigmoid", "--lr", "1e6"], ["dead", "round", "learning rate"]),
    ],
)
def test_a_run_that_cannot_go_on_says_where_and_what_to_try(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], expected: list[str]
) -> None:
    outcome = fedauc(capsys, "run", *TINY, *arguments, "--out", str(tmp_path / "run"))
    message = outcome.err.strip().splitlines()[-1]
    assert outcome.code == 3
    assert message.startswith("stopped in round ")
    assert all(word in message for word in expected), message
    shown = json.loads(fedauc(capsys, "show", str(tmp_path / "run"), "--json").out)
    assert shown["status"] == message


def test_a_method_over_a_file_keeps_what_the_file_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Explicit groups can only come from a file, so a comparison must keep them."""
    groups = {"name": "cyclic", "given": [[0, 1], [2, 3, 4, 5]]}
    recipe = {"method": "cycp-pairwise", "participation": groups, "learning_rate": 0.003, "cycles": 2, "local_steps": 2}
    data = {"name": "synthetic", "clients": 6, "rows_per_client": 30}
    (tmp_path / "mine.json").write_text(json.dumps({"recipe": recipe, "data": data}))
    out = tmp_path / "both"
    named = ("--methods", "cycp-pairwise,cycp-fedavg,cycp-minimax")
    assert fedauc(capsys, "compare", "--config", str(tmp_path / "mine.json"), *named, "--out", str(out)).code == 0
    for method, learning_rate in (("cycp-pairwise", 0.003), ("cycp-fedavg", 0.003), ("cycp-minimax", 0.01)):
        stored_recipe = json.loads((out / method / "seed-0" / "config.json").read_text())["recipe"]
        assert stored_recipe["participation"]["given"] == groups["given"]
        # FedAvg and Pairwise have the same default, so the file's step stays; Minimax brings its own.
        assert stored_recipe["learning_rate"] == learning_rate


def test_a_comparison_gives_options_to_the_methods_that_have_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "both"
    arguments = ("--methods", "cycp-minimax,rs-minimax,cycp-fedavg", "--groups", "3", "--algorithm.prox", "0.1")
    assert fedauc(capsys, "compare", *TINY, *arguments, "--out", str(out)).code == 0
    algorithms = {
        method: json.loads((out / method / "seed-0" / "config.json").read_text())["recipe"]["algorithm"]
        for method in ("cycp-minimax", "rs-minimax", "cycp-fedavg")
    }
    assert algorithms["rs-minimax"]["prox"] == 0.1
    assert "prox" not in algorithms["cycp-fedavg"]
    refused = fedauc(capsys, "compare", *TINY, "--methods", "fedavg,cycp-fedavg", "--algorithm.prox", "1", "--out", "x")
    assert (refused.code, "algorithm.prox is not a parameter" in refused.err) == (2, True)
    # One of the two has an amplification, none a proximal weight: the second is named.
    both = ("--methods", "a-fedavg,cycp-fedavg", "--algorithm.prox", "1", "--algorithm.amplify", "2")
    assert "algorithm.prox is not a parameter" in fedauc(capsys, "compare", *TINY, *both, "--out", "x").err


def test_a_comparison_survives_a_run_that_cannot_go_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "both"
    arguments = ("--methods", "cycp-minimax,cycp-pairwise", "--score", "identity", "--lr", "50")
    for command in (["compare", *TINY, *arguments, "--out", str(out)], ["resume", str(out)]):
        outcome = fedauc(capsys, *command)
        assert outcome.code == 3
        assert "cycp-minimax/seed-0: stopped in round" in outcome.err
        assert "cycp-pairwise" in outcome.out
    assert (out / "curves.png").is_file()


def test_resume_leaves_a_finished_run_as_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    fedauc(capsys, "run", *TINY, "--out", str(out))
    sorted((out / "checkpoints").iterdir())[-1].unlink()
    before = {name: (out / name).read_bytes() for name in ("records.jsonl", "timing.jsonl", "result.json")}
    assert fedauc(capsys, "resume", str(out)).code == 0
    assert {name: (out / name).read_bytes() for name in before} == before


def test_resume_refuses_other_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, out = Path(table(tmp_path / "rows.npz", y=np.arange(40) % 3 == 0)), tmp_path / "run"
    data = ("--data", "table", "--data.path", str(path))
    assert fedauc(capsys, "run", *data, "--cycles", "2", "--local-steps", "2", "--out", str(out)).code == 0
    table(path, x=np.linspace(-1, 1, 80).reshape(40, 2) ** 3, y=np.arange(40) % 3 == 0)
    outcome = fedauc(capsys, "resume", str(out))
    assert (outcome.code, "fingerprint" in outcome.err) == (2, True)


@pytest.mark.parametrize("method", ["cycp-pairwise", "cycp-fedavg"])
def test_evaluation_counts_learning_cycles(capsys: pytest.CaptureFixture[str], tmp_path: Path, method: str) -> None:
    """Every 2 of 7 cycles, and the last; the scoring cycle of the pairwise method is not one."""
    out, every = tmp_path / "run", ("--evaluate-every", "2")
    fedauc(capsys, "run", *TINY, "--cycles", "7", "--groups", "3", "--method", method, *every, "--out", str(out))
    scoring = 3 if method == "cycp-pairwise" else 0
    records = [json.loads(line)["rounds"] for line in (out / "records.jsonl").read_text().splitlines()]
    assert records == [scoring + 3 * cycles for cycles in (2, 4, 6, 7)]
    saved = [int(path.stem.removeprefix("round-")) for path in sorted((out / "checkpoints").iterdir())]
    assert saved == [0, scoring + 3 * 7], "a short run is saved before its first round and after its last"


def test_a_short_configuration_file_is_enough(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(
        json.dumps({"recipe": {"method": "rs-minimax", "participation": {"groups": 3}}})
    )
    outcome = fedauc(capsys, "run", "--config", str(tmp_path / "mine.json"), *TINY, "--out", str(tmp_path / "run"))
    assert outcome.code == 0, outcome.err
    recipe = json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]
    assert (recipe["participation"]["name"], recipe["participation"]["groups"]) == ("uniform", 3)


def test_the_theorys_schedule_brings_its_proximal_weight(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The reference then travels: d + 2 = 13 floats per client and stage, beside 14 each visit."""
    for stages, floats in (("constant", 12 * 14), ("theory", 12 * 14 + 6 * 13)):
        out = tmp_path / stages
        chosen = ("--method", "cycp-minimax", "--groups", "3", "--stages", stages)
        assert fedauc(capsys, "run", *TINY, *chosen, "--out", str(out)).code == 0
        assert json.loads(fedauc(capsys, "show", str(out), "--json").out)["floats_down"] == floats


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_profile_says_where_the_time_went(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The profiler sees one thread; on a slow machine every model is slow enough for several.
    monkeypatch.setattr(loop, "USE_THREADS_FROM", 0.0)
    chosen = ("--method", "cycp-pairwise", "--engine", engine, "--profile")
    outcome = fedauc(capsys, "run", *TINY, *chosen, "--out", str(tmp_path / "run"))
    assert outcome.code == 0
    lines = outcome.out[outcome.out.index("where the time went") :].splitlines()
    calls = {line[:20].strip(): int(line.split()[-1]) for line in lines[1:] if line.strip()}
    # 2 learning cycles and a scoring cycle of 6 rounds with one client each, 2 steps a visit.
    assert calls["local steps"] == 3 * 6 * 2
    assert calls["draw passive scores"] == 2 * 6
    shares = [int(line.split()[-2].rstrip("%")) for line in lines[1:] if line.strip() and not line.startswith("-")]
    assert sum(shares) == pytest.approx(100, abs=5)


@pytest.mark.parametrize(
    "command", [("run", "--method", "cycp-fedavg"), ("compare", "--methods", "cycp-fedavg,fedavg", "--seeds", "0,1")]
)
def test_why_a_model_runs_in_the_plain_loop_is_said_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    # A process says it once, and earlier tests are part of this one.
    _log_loop_choice.cache_clear()
    images = np.zeros((40, 1, 8, 8), dtype=np.uint8) + np.arange(40, dtype=np.uint8)[:, None, None, None]
    data = ("--data", "table", "--data.path", table(tmp_path / "images.npz", x=images), "--data.standardize", "false")
    steps = ("--model", "small-cnn", "--cycles", "1", "--local-steps", "1")
    outcome = fedauc(capsys, *command, *data, *steps, "--out", str(tmp_path / "out"))
    assert outcome.code == 0, outcome.err
    said = " ".join(outcome.err.split())
    assert said.count("runs in the plain loop") == 1
    assert said.startswith("note: ")
    assert "which stacking on a CPU does not speed up" in said
    assert max(map(len, outcome.err.splitlines())) <= 80
    assert "plain loop" not in outcome.out
    shown = fedauc(capsys, "show", str(tmp_path / "out"), "--json")
    assert json.loads(shown.out)
    assert shown.err == ""
    # What a library user's own logging shows is as it was.
    assert logging.getLogger("fedauc").handlers == []
    assert logging.getLogger("fedauc").level == logging.NOTSET
