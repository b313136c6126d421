"""Transforms, means and server optimizers in whole runs: one result on every engine, in a federation, and resumed."""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedauc.experiments.assembly import Assembly, assemble_training
from fedauc.experiments.checkpoint import MAGIC, Checkpoint, load_checkpoint, save_checkpoint
from fedauc.experiments.config import Config
from fedauc.experiments.recipe import Recipe
from fedauc.federation.server import FederatedRun
from fedauc.ledger import Ledger
from fedauc.models.mlp import MLP
from fedauc.server_optimizers.adaptive import Adam, Yogi
from fedauc.server_optimizers.momentum import Momentum
from fedauc.training import Round
from fedauc.transforms.clip import Clip
from fedauc.transforms.quantize import Quantize
from fedauc.transforms.robust_means import Krum, Median, TrimmedMean
from fedauc.transforms.top_k import TopK
from fedauc.trees import tree_leaves
from fedauc.uploads import UploadPipeline
from federation.memory_grid import collect_rounds, make_agreement, make_exchange, make_grid
from small_federations import FEATURES, same_bits, small_federation, small_recipe

CASES: dict[str, dict[str, Any]] = {
    "clip": {"transforms": (Clip(norm=0.05),)},
    "quantize to 8 bits": {"transforms": (Quantize(block=16),)},
    "quantize to 4 bits without feedback": {"transforms": (Quantize(bits=4, error_feedback=False),)},
    "top-k": {"transforms": (TopK(share=0.2),)},
    "clip and quantize": {"transforms": (Clip(norm=0.05), Quantize())},
    "median": {"mean": Median(), "participation": "full"},
    "trimmed mean": {"mean": TrimmedMean(trim=0.34), "participation": "full"},
    "krum": {"mean": Krum(wrong=1), "participation": "full"},
    "momentum": {"server_optimizer": Momentum()},
    "adam": {"server_optimizer": Adam()},
    "yogi": {"server_optimizer": Yogi()},
    "moving average": {"stage_output": "ema", "ema_decay": 0.7},
    "everything": {
        "transforms": (Clip(norm=0.1), Quantize(bits=4)),
        "mean": TrimmedMean(trim=0.34),
        "participation": "full",
        "server_optimizer": Momentum(),
        "stage_output": "ema",
    },
}

METHODS = ["cycp-fedavg", "cycp-minimax", "cycp-pairwise", "scaffold", "codasca"]
"""One method of each family: duals, control variates, both, scores, and none of them."""


def scorer() -> nn.Module:
    """Two layers, so that there are tensors large enough to be encoded (41 weights)."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def assemble_case(method: str, case: str, engine: str = "loop") -> Assembly:
    return assemble_training(small_recipe(method, engine=engine, **CASES[case]), scorer(), small_federation(times=2))


def run_case(method: str, case: str, engine: str = "loop") -> list[Round]:
    training, _, start = assemble_case(method, case, engine)
    return list(training.rounds(start))


def compare_engines(method: str, case: str, engine: str) -> None:
    """Every round's server state and traffic on the engine and in the loop, to 1e-9."""
    for expected, finished in zip(run_case(method, case), run_case(method, case, engine), strict=True):
        assert finished.traffic == expected.traffic
        pairs = zip(tree_leaves(expected.state.server), tree_leaves(finished.state.server), strict=True)
        for left, right in pairs:
            torch.testing.assert_close(right, left, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_the_batched_engine_gives_the_loops_result(method: str, case: str) -> None:
    compare_engines(method, case, "batched")


@pytest.mark.parametrize("case", ["quantize to 8 bits", "krum", "everything"])
def test_the_graphed_engine_gives_the_loops_result(case: str) -> None:
    """Here its steps are not captured, because there is no device; tests/engines/cuda has a case that is."""
    compare_engines("cycp-minimax", case, "graphed")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("case", ["clip and quantize", "median", "momentum"])
def test_the_compiled_engine_gives_the_loops_result(case: str) -> None:
    compare_engines("cycp-minimax", case, "compiled")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ["graphed", "batched"])
def test_a_gpu_gives_the_loops_result(case: str, engine: str) -> None:
    """To 1e-7, since scales of quantization are float32; the scorer's weights have the same order on both devices."""
    recipe = small_recipe("cycp-minimax", engine=engine, device="cuda", **CASES[case])
    training, _, start = assemble_training(recipe, scorer(), small_federation(times=2))
    for expected, finished in zip(run_case("cycp-minimax", case), training.rounds(start), strict=True):
        assert finished.traffic == expected.traffic
        pairs = zip(tree_leaves(expected.state.server), tree_leaves(finished.state.server), strict=True)
        for left, right in pairs:
            torch.testing.assert_close(right.cpu(), left, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_every_case_changes_the_result(case: str) -> None:
    """A transform that did nothing would pass every comparison of engines."""
    schedule = {name: value for name, value in CASES[case].items() if name == "participation"}
    training, _, start = assemble_training(small_recipe("codasca", **schedule), scorer(), small_federation(times=2))
    *_, plain = training.rounds(start)
    assert not same_bits(plain.state.server.shared, run_case("codasca", case)[-1].state.server.shared)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", ["cycp-minimax", "cycp-pairwise", "scaffold"])
def test_a_run_resumed_in_the_middle_gives_the_same_bits(method: str, case: str, tmp_path: Path) -> None:
    whole = run_case(method, case)
    training, _, state = assemble_case(method, case)
    stop = len(whole) // 2
    for finished in training.rounds(state):
        if finished.state.round == stop:
            break
    saved = Checkpoint(finished.state, training.engine.client_states(), training.ledger, [])
    save_checkpoint(tmp_path / "checkpoint", saved)
    loaded = load_checkpoint(tmp_path / "checkpoint", "cpu")
    resumed, _, _ = assemble_case(method, case)
    resumed.engine.restore_client_states(loaded.client_states)
    resumed.ledger.restore_from(loaded.ledger)
    *_, last = resumed.rounds(loaded.state)
    assert last.state.round == whole[-1].state.round
    assert same_bits(last.state[1:], whole[-1].state[1:])
    assert last.traffic == whole[-1].traffic


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", ["cycp-pairwise", "codasca"])
def test_a_federation_of_sites_gives_the_simulators_bits(method: str, case: str, tmp_path: Path) -> None:
    agreement = replace(
        make_agreement(method, {"evaluation": "none"}, **{"participation": "cyclic", **CASES[case]}),
        model=MLP(hidden=(8,)),
    )
    grid, rounds = make_grid(tmp_path / "sites"), list[Round]()
    run = FederatedRun.create(agreement, make_exchange(grid, agreement), tmp_path / "run")
    collect_rounds(run, rounds)
    recipe = replace(agreement.recipe, engine="loop")
    training, _, start = assemble_training(recipe, agreement.model.build((FEATURES,), recipe.seed), small_federation())
    for expected, finished in zip(training.rounds(start), rounds, strict=True):
        assert same_bits(expected.state.server, finished.state.server)
        assert expected.traffic == finished.traffic


def test_the_ledger_counts_what_travels() -> None:
    """Four bits instead of 64 for 32 weights of the first layer, of 41; the rest and the dual variables as they are."""
    plain, coded = (
        assemble_training(small_recipe("cycp-minimax", **changes), scorer(), small_federation(times=2))
        for changes in ({}, {"transforms": (Quantize(bits=4, block=64),)})
    )
    *_, before = plain.training.rounds(plain.start)
    *_, after = coded.training.rounds(coded.start)
    visits = before.traffic.visits
    # The model is one vector of 49 weights, and there are 3 dual variables.
    assert before.traffic.bytes_up == visits * 8 * (49 + 3)
    assert after.traffic.bytes_up == visits * (25 + 4 + 8 * 3)
    assert after.traffic.bytes_down == before.traffic.bytes_down


def test_what_does_not_compose_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="'quantize' and 'top-k'; what one of them encodes cannot be encoded again"):
        UploadPipeline((Quantize(), TopK()))
    with pytest.raises(ValueError, match="'quantize' before 'clip'; 'clip' after it would see codes"):
        Recipe.of("cycp-fedavg", transforms=["quantize", "clip"])
    with pytest.raises(ValueError, match="transforms lists 'clip' 2 times"):
        UploadPipeline((Clip(), Clip(norm=2.0)))
    with pytest.raises(ValueError, match="mean is 'krum', which needs 3 clients per round; there are 2"):
        assemble_training(small_recipe("cycp-fedavg", mean=Krum(wrong=3)), scorer(), small_federation())


def test_a_configuration_with_everything_survives_its_file() -> None:
    config = Config(recipe=Recipe.of("cycp-pairwise", **CASES["everything"]))
    assert Config.from_json(config.to_json()) == config


def test_an_old_checkpoint_without_an_optimizer_is_read(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save_checkpoint(path, Checkpoint(assemble_case("cycp-fedavg", "clip").start, {}, Ledger(), []))
    content = torch.load(io.BytesIO(path.read_bytes().partition(b"\n")[2]), weights_only=True)
    del content["optimizer"]
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.write_bytes(MAGIC + hashlib.sha256(buffer.getvalue()).hexdigest().encode() + b"\n" + buffer.getvalue())
    assert load_checkpoint(path, "cpu").state.optimizer == ()


def test_the_moving_average_is_that_of_a_numpy_loop() -> None:
    """With decay d, the average after n rounds weights the model of round i by d^(n-i)."""
    plain = run_case("cycp-fedavg", "clip")[:2]
    recipe = small_recipe("cycp-fedavg", stages="constant", **{**CASES["clip"], **CASES["moving average"]})
    training, _, start = assemble_training(recipe, scorer(), small_federation(times=2))
    first, second, *_ = training.rounds(start)
    vectors = [finished.state.server.shared.weights.numpy() for finished in plain]
    average = training.averaged_shared(second.state).weights.numpy()
    expected = (0.7 * vectors[0] + vectors[1]) / 1.7
    assert abs(average - expected).max() < 1e-14
    assert same_bits(training.averaged_shared(first.state).weights, first.state.server.shared.weights)
