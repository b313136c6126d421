"""The site's side: one message in, one message out, whatever happens.

For a visit a site does what the reference engine does for one client: the same draws, the same steps, the same client
state. It tells the server how many rows of each class it holds, the shape of a row, and what the algorithm uploads,
and nothing else unless the site's policy allows it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import nn

from fedauc.data.checks import as_inputs
from fedauc.discovery import UnknownName
from fedauc.engines.loop import LoopEngine
from fedauc.experiments.assembly import DTYPES
from fedauc.experiments.config import from_plain
from fedauc.experiments.recipe import Recipe
from fedauc.federation.evaluation import count_score_bins
from fedauc.federation.serialization import Payload, pack_payload, rebuild_tree, unpack_tensors
from fedauc.federation.site_data import SiteData, SiteDataLoader, describe_row_type
from fedauc.federation.site_state import MissingSiteState, SiteState, load_client_state, save_client_state
from fedauc.federation.visit_messages import build_setting, phase_from_json, unpack_download
from fedauc.metrics import auc
from fedauc.models.model import ModelConfig
from fedauc.network import Compute, ModuleNetwork
from fedauc.plugins import VARIABLE
from fedauc.trees import is_empty
from fedauc.wrappers import wrap_algorithm

LOG = logging.getLogger("fedauc.site")

ModelBuilder = Callable[[tuple[int, ...], int], nn.Module]
"""Builds a federation's own model for rows of that shape, initialised by that seed."""

SHARING_LEVELS = ("nothing", "histograms", "scores")
"""What a site may send about its scores; each level includes the ones before it."""


class SiteRefusal(Exception):
    """A site does not do what it was asked. The text goes to the server, so it must not contain data."""


class SitePolicy(NamedTuple):
    """What the site's owner allows: what may be sent about held-out scores, and whether the site's own AUC may be."""

    shared_scores: Literal["nothing", "histograms", "scores"] = "histograms"
    share_auc: bool = False


DEFAULT_POLICY = SitePolicy()


class Site:
    """Answers the server's messages with data that never leaves the site. `open_state` opens the state of a run."""

    def __init__(
        self,
        load_data: SiteDataLoader,
        open_state: Callable[[str], SiteState],
        policy: SitePolicy = DEFAULT_POLICY,
        build_model: ModelBuilder | None = None,
    ) -> None:
        if policy.shared_scores not in SHARING_LEVELS:
            raise ValueError(f"share is {policy.shared_scores!r}; use {', '.join(map(repr, SHARING_LEVELS))}")
        self._load_data, self._open_state, self._policy, self._build_model = load_data, open_state, policy, build_model

    def answer_message(self, payload: Payload) -> Payload:
        """The answer to a message; a failure is an answer too."""
        try:
            header = payload.read_header()
            handlers = {"register": self._register, "visit": self._train_visit, "evaluate": self._evaluate_model}
            if header.get("kind") not in handlers:
                raise SiteRefusal(
                    f"the message is of kind {header.get('kind')!r}; this site knows {', '.join(handlers)}"
                )
            return handlers[header["kind"]](header, payload)
        except MissingSiteState as missing:
            return pack_payload({"kind": "missing-state", "what": str(missing)})
        except SiteRefusal as reason:
            LOG.warning("%s", reason)
            return pack_payload({"kind": "refusal", "reason": str(reason)})
        except Exception as error:
            return refuse_after_error(error)

    def _register(self, header: dict[str, Any], payload: Payload) -> Payload:
        data = self._load_data()
        as_inputs(data.inputs)
        dtype = describe_row_type(data.inputs.dtype)
        shape = list(data.inputs.shape[1:])
        return pack_payload({"kind": "register", "class_counts": data.class_counts, "shape": shape, "dtype": dtype})

    def _train_visit(self, header: dict[str, Any], payload: Payload) -> Payload:
        data, recipe, client = self._load_data(), _decode_recipe(header), header["client"]
        network = self._build_network(header, data)
        algorithm = wrap_algorithm(recipe.algorithm, recipe.wrappers, network.parameter_lengths)
        setting = build_setting(header, recipe, data.class_counts)
        phase, store = phase_from_json(header["phase"]), self._open_state(header["run"])
        download = unpack_download(algorithm, setting, network, phase, payload, store)
        uploads, clients_total = recipe.uploads, setting.census.positives.size
        clients = data.as_only_client(client, clients_total)
        engine = LoopEngine(algorithm, network, clients, setting, uploads)
        initial_state = uploads.initial_client_state(algorithm, download)
        last_accepted = header["last_accepted_round"]
        if not is_empty(initial_state):
            client_state = load_client_state(store, last_accepted, initial_state)
            if not is_empty(client_state):
                engine.restore_client_states({client: client_state})
        upload, _, client_state, _ = engine.visit_client(download, client)
        if not is_empty(initial_state):
            save_client_state(store, phase.round, client_state, last_accepted)
        answer = {"kind": "visit", "round": phase.round, "class_counts": data.class_counts}
        return pack_payload(answer, {"mean": upload.mean, "pool": upload.pool})

    def _evaluate_model(self, header: dict[str, Any], payload: Payload) -> Payload:
        requested, data = header["requested"], self._load_data()
        if SHARING_LEVELS.index(requested) > SHARING_LEVELS.index(self._policy.shared_scores):
            raise SiteRefusal(f"the server asks for {requested}; this site shares {self._policy.shared_scores}")
        if data.test is None:
            raise SiteRefusal("the server asks for an evaluation; this site holds no test rows")
        network = self._build_network(header, data)
        model = rebuild_tree(unpack_tensors(payload)["model"], network.initial_model(), "model")
        scores, labels = network.predict(model, data.test.inputs).double(), data.test.labels.double()
        site_auc = auc(labels, scores) if 0 < labels.sum() < len(labels) else None
        LOG.info("AUC of this site's %d test rows: %s", len(labels), site_auc)
        answer = {"kind": "evaluate", "round": header["round"]}
        if self._policy.share_auc:
            answer["auc"] = site_auc
        tensors = (count_score_bins(scores, labels),) if requested == "histograms" else (scores, labels)
        return pack_payload(answer, {requested: tensors})

    def _build_network(self, header: dict[str, Any], data: SiteData) -> ModuleNetwork:
        recipe = _decode_recipe(header)
        config: ModelConfig = _decode_value(ModelConfig, header["model"], "model")
        module = (self._build_model or config.build)(tuple(data.inputs.shape[1:]), recipe.seed)
        return ModuleNetwork(module, DTYPES[recipe.dtype], Compute(mixed=recipe.precision == "mixed"))


def refuse_after_error(error: Exception) -> Payload:
    """The answer after an unexpected error: its type alone, because an error message may quote rows."""
    LOG.error("the message could not be answered", exc_info=error)
    return pack_payload({"kind": "refusal", "reason": f"{type(error).__name__}; see the site's log"})


def _decode_recipe(header: dict[str, Any]) -> Recipe:
    # The site decides where it computes.
    recipe: Recipe = _decode_value(Recipe, {**header["recipe"], "device": "cpu", "engine": "loop"}, "recipe")
    return recipe


def _decode_value(kind: type, data: Any, where: str) -> Any:
    """The value that the server describes. A site uses the plug-ins that its owner has installed, and no others."""
    try:
        return from_plain(kind, data, where)
    except UnknownName as error:
        # Names come from the message and from the library, so that the text contains no data.
        raise SiteRefusal(f"{error}; install the plug-in that has it at this site, or name it in {VARIABLE}") from error
