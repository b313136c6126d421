"""The site's side: one message in, one message out, whatever happens.

A site does what the reference engine does for one client: the same draws, verbs and memory. It tells the server how
many rows of each class it holds, the shape of a row, and what the algorithm uploads; nothing else, unless its owner
allows it.

Memory is kept by round. The server names the visit whose upload it last used, so a visit that came too late, was
refused or is repeated after a crash leaves no trace: the next one starts from the memory of the named visit.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from fedauc.data.checks import as_inputs
from fedauc.engines.loop import LoopEngine
from fedauc.experiments.assembly import DTYPES
from fedauc.experiments.codec import from_plain
from fedauc.experiments.recipe import Recipe
from fedauc.federation import visit_messages as orders
from fedauc.federation.evaluation import count_score_bins
from fedauc.federation.serialization import Payload, pack_payload, rebuild_tree, unpack_tensors
from fedauc.federation.site_data import SiteData, SiteDataLoader, client_of_site
from fedauc.federation.site_state import SiteState
from fedauc.interfaces import Algorithm, Cohort, Download, Setting
from fedauc.metrics import auc
from fedauc.models.model import ModelConfig
from fedauc.network import Compute, ModuleNetwork
from fedauc.trees import Tree, is_empty, tree_map

LOG = logging.getLogger("fedauc.site")

ModelBuilder = Callable[[tuple[int, ...], int], nn.Module]
"""A model of the federation's own: rows of that shape, initialised by that seed."""

SHARING_LEVELS = ("nothing", "histograms", "scores")
"""What a site may tell of its scores, each including those before it."""


class SiteRefusal(Exception):
    """Why a site does not do as asked; the text goes to the server, so it must not speak of rows."""


class SitePolicy(NamedTuple):
    """What the site's owner allows: what to tell of held-out scores, and whether to tell the site's own AUC."""

    shared_scores: Literal["nothing", "histograms", "scores"] = "histograms"
    share_auc: bool = False


DEFAULT_POLICY = SitePolicy()
"""Unless a site's owner says otherwise."""


class Job(NamedTuple):
    """What a message's facts describe: the algorithm and network to run, and the run's setting for this client."""

    algorithm: Algorithm
    network: ModuleNetwork
    setting: Setting
    client: int


class Site:
    """Answers orders with data that never leaves it. `drawer` gives the run's drawer."""

    def __init__(
        self,
        load: SiteDataLoader,
        drawer: Callable[[str], SiteState],
        allows: SitePolicy = DEFAULT_POLICY,
        build: ModelBuilder | None = None,
    ) -> None:
        if allows.shared_scores not in SHARING_LEVELS:
            raise ValueError(f"share is {allows.shared_scores!r}; use {', '.join(map(repr, SHARING_LEVELS))}")
        self._load, self._drawer, self._allows, self._build = load, drawer, allows, build

    def answer_message(self, parcel: Payload) -> Payload:
        """The answer to a message; a failure is an answer too."""
        try:
            facts = parcel.read_header()
            answers = {"hello": self._hello, "visit": self._visit, "evaluate": self._evaluate}
            if facts.get("kind") not in answers:
                raise SiteRefusal(f"the order's kind is {facts.get('kind')!r}; this site knows {', '.join(answers)}")
            return answers[facts["kind"]](facts, parcel)
        except orders.MissingSiteState as lacking:
            return pack_payload({"kind": "lacking", "what": str(lacking)})
        except SiteRefusal as reason:
            LOG.warning("%s", reason)
            return pack_payload({"kind": "unable", "reason": str(reason)})
        except Exception as error:  # A client function that raises stops serving, and a message may quote rows.
            LOG.exception("the order failed")
            return pack_payload({"kind": "unable", "reason": f"{type(error).__name__}; the site's log says more"})

    def _hello(self, facts: dict[str, Any], parcel: Payload) -> Payload:
        data = self._load()
        as_inputs(data.inputs)
        kind = "uint8" if data.inputs.dtype == torch.uint8 else "float"
        return pack_payload(
            {"kind": "hello", "rows": data.class_counts, "shape": list(data.inputs.shape[1:]), "dtype": kind}
        )

    def _visit(self, facts: dict[str, Any], parcel: Payload) -> Payload:
        data = self._load()
        job, phase = self._job(facts, data), orders.phase_from_json(facts["phase"])
        drawer = self._drawer(facts["run"])
        download = orders.unpack_download(job.algorithm, job.setting, job.network, phase, parcel, drawer)
        engine = LoopEngine(
            job.algorithm, job.network, client_of_site(data, job.client, job.setting.census), job.setting
        )
        initial_client_state = job.algorithm.initial_client_state(download)
        client_state = (
            () if is_empty(initial_client_state) else self._memory(drawer, facts["accepted"], initial_client_state)
        )
        if not is_empty(client_state):
            engine.restore_client_states({job.client: client_state})
        visits = engine.visit(_stacked(download), Cohort(phase.round, (job.client,), (1.0,)))
        if not is_empty(initial_client_state):
            self._keep(drawer, facts["accepted"], phase.round, engine.client_states().get(job.client, ()))
        trees = {"mean": visits.upload.mean, "pool": visits.upload.pool}
        return pack_payload({"kind": "visit", "round": phase.round, "rows": data.class_counts}, trees)

    def _evaluate(self, facts: dict[str, Any], parcel: Payload) -> Payload:
        ask, data = facts["ask"], self._load()
        if SHARING_LEVELS.index(ask) > SHARING_LEVELS.index(self._allows.shared_scores):
            raise SiteRefusal(f"the order asks for {ask}; this site shares {self._allows.shared_scores}")
        if data.test is None:
            raise SiteRefusal("the order asks for an evaluation; this site holds no test rows")
        network = self._network(facts, data)
        model = rebuild_tree(unpack_tensors(parcel)["model"], network.state(), "model")
        scores, labels = network.predict(model, data.test.inputs).double(), data.test.labels.double()
        own = auc(labels, scores) if 0 < labels.sum() < len(labels) else None
        LOG.info("AUC of this site's %d test rows: %s", len(labels), own)
        told = {"auc": own} if self._allows.share_auc else {}
        tensors = (count_score_bins(scores, labels),) if ask == "histograms" else (scores, labels)
        return pack_payload({"kind": "evaluate", "round": facts["round"], **told}, {ask: tensors})

    def _job(self, facts: dict[str, Any], data: SiteData) -> Job:
        recipe = _recipe(facts)
        setting = orders.build_setting(facts, recipe, data.class_counts)
        return Job(recipe.algorithm, self._network(facts, data), setting, facts["client"])

    def _network(self, facts: dict[str, Any], data: SiteData) -> ModuleNetwork:
        recipe = _recipe(facts)
        config: ModelConfig = from_plain(ModelConfig, facts["model"], "model")
        build = self._build or config.build
        compute = Compute(mixed=recipe.precision == "mixed")
        return ModuleNetwork(build(tuple(data.inputs.shape[1:]), recipe.seed), DTYPES[recipe.dtype], compute)

    def _memory(self, drawer: SiteState, accepted: int, initial_client_state: Tree) -> Tree:
        """What the named visit left behind; `()` before the first."""
        if accepted < 0:
            return ()
        kept = drawer.load_payload(f"memory-{accepted}")
        if kept is None:
            raise orders.MissingSiteState("memory")
        leaves = unpack_tensors(kept)["memory"]
        return rebuild_tree(leaves, initial_client_state, "memory") if leaves else ()

    def _keep(self, drawer: SiteState, accepted: int, round: int, client_state: Tree) -> None:
        """Two versions at most: the one the server knows of, and the one it may come to know of."""
        drawer.save_payload(f"memory-{round}", pack_payload({}, {"memory": client_state}))
        for name in drawer.list_names():
            if name.startswith("memory-") and name not in (f"memory-{accepted}", f"memory-{round}"):
                drawer.delete_payload(name)


def _stacked(download: Download) -> Download:
    """The order of a cohort of one."""
    return download._replace(per_client=tree_map(lambda leaf: leaf[None], download.per_client))


def _recipe(facts: dict[str, Any]) -> Recipe:
    # Where a site computes is its own affair.
    return _decoded(json.dumps({**facts["recipe"], "device": "cpu", "engine": "loop"}))


@lru_cache(maxsize=8)
def _decoded(recipe: str) -> Recipe:
    found: Recipe = from_plain(Recipe, json.loads(recipe), "recipe")
    return found
