"""Token ids stay integers from the data to the model, on every engine, across machines and in every precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedauc.data.checks import as_inputs
from fedauc.data.clients import Clients, examples
from fedauc.data.dataset import Dataset
from fedauc.data.datasets.synthetic import Synthetic
from fedauc.data.datasets.synthetic_tokens import SyntheticTokens
from fedauc.data.datasets.table import Table
from fedauc.data.preparation import Preparation, Split, prepare_table
from fedauc.engines import engines
from fedauc.engines.batched import BatchedEngine
from fedauc.engines.kernels import Unsupported
from fedauc.experiments.assembly import assemble_training
from fedauc.experiments.config import Config
from fedauc.experiments.fitting import fit
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.runner import Run
from fedauc.federation.agreement import FederationAgreement, SiteEntry
from fedauc.federation.registration import register_sites
from fedauc.federation.server import FederatedRun
from fedauc.federation.site import Site
from fedauc.federation.site_data import SiteData
from fedauc.federation.site_state import FolderSiteState
from fedauc.models._layers import AttentionBlock
from fedauc.models.transformer import Transformer
from fedauc.testing.model import check_model
from federation.memory_grid import MemoryGrid, make_exchange, make_policy
from small_federations import same_bits

TOKENS = SyntheticTokens(clients=6, rows_per_client=20, length=5, vocabulary=30)
MODEL = Transformer(vocabulary=30, width=8, heads=2, blocks=1)
LARGE_ID = 2**24 + 1
"""The smallest integer that float32 cannot hold."""


def load_tokens() -> Split:
    return prepare_table(TOKENS.load(0), Preparation(), 0)


def make_recipe(method: str = "cycp-pairwise", **changes: Any) -> Recipe:
    settings = {"cycles": 2, "groups": 2, "local_steps": 3, "positives": 2, "negatives": 3, "seed": 3, **changes}
    return Recipe.of(method, **settings)


def train(recipe: Recipe) -> Tensor:
    clients = load_tokens().train
    training, _, start = assemble_training(recipe, MODEL.build((TOKENS.length,), 0), clients)
    *_, last = training.rounds(start)
    return training.algorithm.extract_model(last.state.server.shared).weights


def test_the_transformer_passes_the_suite_of_models_on_token_ids() -> None:
    check_model(MODEL, load_tokens().train.inputs[:5])
    assert not list(MODEL.build((TOKENS.length,), 0).buffers())


@pytest.mark.parametrize("method", ["cycp-pairwise", "cycp-fedavg", "a-scaffold"])
@pytest.mark.parametrize("engine", sorted(set(engines()) - {"loop", "compiled"}))
def test_every_engine_gives_the_weights_of_the_loop(method: str, engine: str) -> None:
    expected, found = (train(make_recipe(method, engine=name, dtype="float64")) for name in ("loop", engine))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_auto_stacks_the_clients_and_compiled_says_why_it_cannot() -> None:
    clients, module = load_tokens().train, MODEL.build((TOKENS.length,), 0)
    assert isinstance(assemble_training(make_recipe(), module, clients).training.engine, BatchedEngine)
    with pytest.raises(Unsupported, match="layers without a kernel"):
        assemble_training(make_recipe(engine="compiled"), module, clients)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_token_ids_reach_the_model_unchanged(dtype: str) -> None:
    seen: list[Tensor] = []

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.linspace(-1, 1, 7))

        def forward(self, tokens: Tensor) -> Tensor:
            seen.append(tokens)
            return self.table[tokens % 7].mean(-1)

    rows = np.array([[LARGE_ID + row, row] for row in range(12)])
    clients = Clients.from_arrays(rows, np.arange(12) % 2, np.arange(12) % 3)
    assert clients.inputs.dtype == torch.int64
    fitted = fit(
        Watching(),
        clients,
        make_recipe("cycp-fedavg", engine="loop", dtype=dtype, groups=1),
        test=(rows, np.arange(12) % 2),
    )
    fitted.scores(rows)
    assert {tokens.dtype for tokens in seen} == {torch.int64}
    assert set(torch.cat([tokens.flatten() for tokens in seen]).tolist()) <= set(rows.flatten().tolist())


def test_int32_stays_and_narrower_integers_become_floats() -> None:
    assert as_inputs(np.ones((2, 2), np.int32)).dtype == torch.int32
    assert as_inputs(np.ones((2, 2), ">i4")).dtype == torch.int32
    assert as_inputs(torch.ones(2, 2, dtype=torch.int64)).dtype == torch.int64
    assert as_inputs(np.ones((2, 2), np.int16)).dtype == torch.float32
    assert as_inputs(np.ones((2, 2), bool)).dtype == torch.float32
    assert examples(np.arange(8).reshape(4, 2), [0, 1, 0, 1]).inputs.dtype == torch.int64


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_model_of_floats_takes_integers_as_before(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    """Counts in a table are numbers: a model without a place for integers gets floats, and the log says so."""
    rows, labels, owner = np.arange(48).reshape(24, 2) % 7, np.arange(24) % 2, np.arange(24) % 3
    outcomes = []
    with caplog.at_level("INFO", "fedauc"):
        for inputs in (rows, rows.astype(np.float32)):
            module = nn.Linear(2, 1)
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
            recipe = make_recipe("cycp-fedavg", engine=engine, groups=1)
            fitted = fit(module, Clients.from_arrays(inputs, labels, owner), recipe, test=(inputs, labels))
            outcomes.append([*fitted.module.state_dict().values(), torch.from_numpy(fitted.scores(rows))])
    assert all(map(torch.equal, *outcomes))
    assert "integer inputs become torch.float32: the model accepts no integers" in caplog.text


def test_an_id_beyond_the_vocabulary_is_refused_before_training() -> None:
    clients = load_tokens().train
    module = replace(MODEL, vocabulary=int(clients.inputs.max())).build((TOKENS.length,), 0)
    with pytest.raises(ValueError, match=r"the model does not accept rows of shape \(5,\) and type torch.int64: index"):
        assemble_training(make_recipe(), module, clients)


@pytest.mark.parametrize(
    ("data", "vocabulary", "message"),
    [
        (
            TOKENS,
            20,
            r"rows hold the token id 29; it must be below vocabulary, which is 20: raise it to 30 "
            r"\(--model.vocabulary 30\)",
        ),
        (
            Synthetic(clients=4),
            20,
            r"model 'transformer' needs token ids \(integers\), but rows are torch.float32: use",
        ),
    ],
)
def test_a_run_refuses_rows_without_fitting_token_ids(
    data: Dataset, vocabulary: int, message: str, tmp_path: Path
) -> None:
    config = Config(recipe=make_recipe(), data=data, model=replace(MODEL, vocabulary=vocabulary))
    with pytest.raises(ValueError, match=message):
        Run.create(config, tmp_path / "run")
    with pytest.raises(ValueError, match="rows hold the token id -1; it must be at least 0: number the tokens from 0"):
        MODEL.check_inputs(torch.tensor([[-1, 3]]))


def test_a_width_that_the_heads_do_not_divide_and_images_are_refused() -> None:
    with pytest.raises(ValueError, match="width is 10; it must be a multiple of the 4 heads"):
        Transformer(width=10)
    with pytest.raises(ValueError, match="the transformer takes rows of token ids"):
        Transformer().build((3, 8, 8), 0)


def test_attention_is_torchs_own() -> None:
    """The block against torch's encoder layer with the same weights."""
    block = AttentionBlock(8, 2).double()
    layer = nn.TransformerEncoderLayer(8, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True).double()
    names = {
        "self_attn.in_proj_weight": "projections.weight",
        "self_attn.in_proj_bias": "projections.bias",
        "self_attn.out_proj.weight": "output.weight",
        "self_attn.out_proj.bias": "output.bias",
        "linear1.weight": "mixing.0.weight",
        "linear1.bias": "mixing.0.bias",
        "linear2.weight": "mixing.2.weight",
        "linear2.bias": "mixing.2.bias",
        "norm1.weight": "attention_norm.weight",
        "norm1.bias": "attention_norm.bias",
        "norm2.weight": "mixing_norm.weight",
        "norm2.bias": "mixing_norm.bias",
    }
    layer.load_state_dict({theirs: block.state_dict()[ours] for theirs, ours in names.items()})
    states = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 5, 8)))
    torch.testing.assert_close(block(states), layer(states))


def test_a_run_on_tokens_learns_and_writes_a_folder(tmp_path: Path) -> None:
    data = SyntheticTokens(clients=6, rows_per_client=60, length=8, vocabulary=30, signal=0.4)
    recipe = make_recipe(cycles=15, local_steps=8, positives=8, negatives=8, learning_rate=0.5)
    result = Run.create(Config(recipe=recipe, data=data, model=MODEL), tmp_path / "run").train_to_end()
    assert result["final"]["auc"] > 0.75


def test_a_file_of_tokens_stays_integers_unless_it_is_standardized(tmp_path: Path) -> None:
    path, rows = tmp_path / "tokens.npz", np.arange(80).reshape(40, 2)
    np.savez(path, x=rows, y=np.arange(40) % 2, client=np.arange(40) % 4)
    assert Table(path=str(path), standardize=False).load(0).train.inputs.dtype == np.int64
    assert Table(path=str(path)).load(0).train.inputs.dtype == np.float32


def test_the_federation_trains_on_tokens(tmp_path: Path) -> None:
    clients = load_tokens().train

    def load_site(client: int) -> SiteData:
        rows = clients.rows[clients.offsets[client] : clients.offsets[client + 1]]
        folder = tmp_path / "rows" / str(client)
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "x.npy", clients.inputs[rows].numpy())
        np.save(folder / "y.npy", clients.labels[rows].numpy())
        return SiteData.from_folder(folder)

    names = [f"site-{client}" for client in range(len(clients))]
    sites = {
        name: Site(
            lambda client=client: load_site(client),  # type: ignore[misc]
            lambda run_id, name=name: FolderSiteState(tmp_path / "state" / name / run_id),  # type: ignore[misc]
        )
        for client, name in enumerate(names)
    }
    entries = tuple(SiteEntry(name, f"g{client % 2}", f"key-of-{name}") for client, name in enumerate(names))
    policy = make_policy(evaluation="none")
    recipe = replace(make_recipe(engine="loop", groups=None))
    agreement = FederationAgreement(recipe=recipe, sites=entries, model=MODEL, policy=policy)
    exchange = make_exchange(MemoryGrid(sites), agreement)
    assert register_sites(exchange).dtype == "integer"
    run = FederatedRun.create(agreement, exchange, tmp_path / "run")
    run.train_to_end()
    grouped = replace(clients, groups=np.array([entry.group for entry in entries]))
    training, _, start = assemble_training(recipe, MODEL.build((TOKENS.length,), recipe.seed), grouped)
    *_, last = training.rounds(start)
    assert same_bits(run.loop.state.server.shared, last.state.server.shared)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["auto", "graphed"])
def test_a_gpu_gives_the_weights_of_the_loop(engine: str) -> None:
    """Captured without compiling, and compiled."""
    on_cpu = train(make_recipe(engine="loop", dtype="float64"))
    on_gpu = train(make_recipe(engine=engine, dtype="float64", device="cuda"))
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-7, atol=1e-9)
