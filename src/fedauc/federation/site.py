"""The site's side: one message in, one message out, whatever happens.

For a visit a site does what the reference engine does for one client: the same draws, the same steps, the same client
state. It tells the server how many rows of each class it holds, the shape of a row, and what the algorithm uploads,
and nothing else unless the site's policy allows it.
"""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from fedauc.data.checks import as_inputs
from fedauc.data.features import FeatureEncoder
from fedauc.discovery import UnknownName
from fedauc.engines.loop import LoopEngine
from fedauc.experiments.assembly import DTYPES
from fedauc.experiments.config import from_plain
from fedauc.experiments.private_training import has_client_noise
from fedauc.experiments.recipe import Recipe
from fedauc.federation.column_sums import pack_sums
from fedauc.federation.delivery import DeliveredModel, store_model
from fedauc.federation.evaluation import count_score_bins, name_tensors
from fedauc.federation.planned_noise import check_planned_noise
from fedauc.federation.run_plan import RunPlan, describe_validation
from fedauc.federation.schema import DataSchema
from fedauc.federation.secure_site import (
    answer_unmasking,
    create_record,
    mask_upload,
    open_secure_visit,
    repeat_answer,
    replace_secure_sum,
)
from fedauc.federation.serialization import Payload, pack_payload, rebuild_tree, unpack_tensors
from fedauc.federation.site_data import SiteData, describe_row_type
from fedauc.federation.site_report import SiteReport
from fedauc.federation.site_state import (
    MissingSiteState,
    SiteRefusal,
    SiteState,
    load_client_state,
    save_client_state,
)
from fedauc.federation.site_table import SiteTable
from fedauc.federation.versions import find_version_problem
from fedauc.federation.visit_messages import build_setting, phase_from_json, unpack_download
from fedauc.metrics import auc
from fedauc.models.model import ModelConfig
from fedauc.network import Compute, ModuleNetwork
from fedauc.plugins import VARIABLE
from fedauc.transforms.secure_sum import OutOfRangeError
from fedauc.trees import is_empty
from fedauc.wrappers import wrap_algorithm
from fedauc.wrappers.example_dp import ExampleDP

LOG = logging.getLogger("fedauc.site")

ModelBuilder = Callable[[tuple[int, ...], int], nn.Module]
"""Builds a federation's own model for rows of that shape, initialised by that seed."""

SiteLoader = Callable[[], SiteData | SiteTable]
"""How a site reads its data; called once per message."""

NOISED_ANSWER = "noised-answer"
"""The name of the last answer of a site that protects its rows with noise of its own."""

SHARING_LEVELS = ("nothing", "histograms", "scores")
"""What a site may send about its scores; each level includes the ones before it."""


class SitePolicy(NamedTuple):
    """What the site's owner allows: what may be sent about held-out scores, whether the site's own AUC may be, and
    whether sums of columns may be. `minimum_rows` is the least number of rows that a sum or a class must have.
    """

    shared_scores: Literal["nothing", "histograms", "scores"] = "histograms"
    share_auc: bool = False
    share_sums: bool = True
    minimum_rows: int = 0


DEFAULT_POLICY = SitePolicy()

NOISE_SECRET_BYTES = 32


def draw_noise_secret() -> bytes:
    """A new secret for the noise of one visit, from the operating system's generator."""
    return secrets.token_bytes(NOISE_SECRET_BYTES)


class Site:
    """Answers the server's messages with data that never leaves the site. `open_state` opens the state of a run.

    `draw_secret` is called once per visit: the noise that the site adds in a secure sum comes from it. `report` keeps
    the site's own AUC and thresholds at the site, and `model_folder` holds the models of finished runs.
    """

    def __init__(
        self,
        load_data: SiteLoader,
        open_state: Callable[[str], SiteState],
        policy: SitePolicy = DEFAULT_POLICY,
        build_model: ModelBuilder | None = None,
        draw_secret: Callable[[], bytes] = draw_noise_secret,
        report: SiteReport | None = None,
        model_folder: Path | None = None,
    ) -> None:
        if policy.shared_scores not in SHARING_LEVELS:
            raise ValueError(f"share is {policy.shared_scores!r}; use {', '.join(map(repr, SHARING_LEVELS))}")
        self._load_data, self._open_state, self._policy, self._build_model = load_data, open_state, policy, build_model
        self._draw_secret, self._report, self._model_folder = draw_secret, report, model_folder

    def answer_message(self, payload: Payload) -> Payload:
        """The answer to a message; a failure is an answer too."""
        try:
            return self.answer_planned_message(payload, None)
        except Exception as error:
            return answer_failure(error)

    def answer_planned_message(self, payload: Payload, plan: RunPlan | None) -> Payload:
        """The answer to a message that has been compared with the plan which the site's owner has admitted.

        A refusal, and any other failure, is an exception.
        """
        header = payload.read_header()
        if problem := find_version_problem(header, "the server", "this site"):
            raise SiteRefusal(problem, "message format")
        handlers: dict[str, Callable[[dict[str, Any], Payload], Payload]] = {
            "summarize": self._summarize_columns,
            "register": self._register,
            "visit": functools.partial(self._train_visit, plan),
            "unmask": self._unmask_sum,
            "evaluate": self._evaluate_model,
            "deliver": self._receive_model,
        }
        if header.get("kind") not in handlers:
            raise SiteRefusal(f"the message is of kind {header.get('kind')!r}; this site knows {', '.join(handlers)}")
        return handlers[header["kind"]](header, payload)

    def _summarize_columns(self, header: dict[str, Any], payload: Payload) -> Payload:
        """Check the table against the schema, and send the sums of its columns where the site's policy allows it."""
        table, schema, site = self._load_table(), DataSchema.from_header(header["schema"]), str(header["site"])
        if header.get("needed") and not self._policy.share_sums:
            reason = "this site shares no sums of columns; the schema must give a center and a scale, or categories, to"
            names = ", ".join(map(repr, header["needed"][:3]))
            raise SiteRefusal(f"site {site!r}: {reason} {names}", "disclosure.sums")
        fraction = _read_validation_fraction(header)
        sums = table.sum_training_rows(schema, site, max(1, self._policy.minimum_rows), fraction)
        answer = {"kind": "summarize", **describe_validation(fraction)}
        if not self._policy.share_sums or not header.get("asks_sums"):
            return pack_payload({**answer, "has_sums": False})
        fields, tensors = pack_sums(sums)
        return pack_payload({**answer, "has_sums": True, **fields}, tensors)

    def _load_table(self) -> SiteTable:
        table = self._load_data()
        if not isinstance(table, SiteTable):
            raise SiteRefusal("the run has a schema, but this site's load_data returns arrays: return a SiteTable")
        return table

    def _prepare_data(self, header: dict[str, Any]) -> SiteData:
        """The rows that the site trains on, if they are as many as its policy asks for."""
        data = self._read_data(header)
        _check_counts(data.class_counts, "", self._policy.minimum_rows)
        return data

    def _read_data(self, header: dict[str, Any]) -> SiteData:
        """The rows as they are, or as the schema and the preparation of the run say, less the run's validation rows."""
        if "schema" in header:
            encoder = FeatureEncoder.from_document(header["encoder"])
            data: SiteData | SiteTable = self._load_table().prepare_rows(
                DataSchema.from_header(header["schema"]), encoder, str(header.get("site", "this site"))
            )
        else:
            data = self._load_data()
        data = data.read_without_schema() if isinstance(data, SiteTable) else data
        return data.hold_out_validation(_read_validation_fraction(header))

    def _register(self, header: dict[str, Any], payload: Payload) -> Payload:
        data = self._prepare_data(header)
        as_inputs(data.inputs)
        dtype = describe_row_type(data.inputs.dtype)
        answer: dict[str, Any] = {"kind": "register", "shape": list(data.inputs.shape[1:]), "dtype": dtype}
        answer |= describe_validation(_read_validation_fraction(header))
        # Where clients add the noise, the server may know that a site has rows, but not how many of which class.
        counts = {"has_rows": len(data.labels) > 0} if header.get("hides_counts") else _describe_counts(data)
        if header.get("secure_sum"):
            answer["public_key"] = create_record(self._open_state(header["run"])).public_key.hex()
        return pack_payload({**answer, **counts})

    def _train_visit(self, plan: RunPlan | None, header: dict[str, Any], payload: Payload) -> Payload:
        data, recipe, client = self._prepare_data(header), _decode_recipe(header), header["client"]
        network = self._build_network(header, data)
        buffers = network.buffer_names
        algorithm = wrap_algorithm(recipe.algorithm, recipe.wrappers, network.parameter_lengths, buffers)
        setting = build_setting(header, recipe, data.class_counts)
        phase, store = phase_from_json(header["phase"]), self._open_state(header["run"])
        uploads, clients_total = recipe.uploads, setting.census.positives.size
        protects_examples = any(isinstance(wrapper, ExampleDP) for wrapper in recipe.wrappers)
        turn = header["cycle_length"] if plan is not None and plan.once_per_cycle else 1
        if protects_examples and (answer_again := _repeat_noised_answer(store, phase.round, turn)) is not None:
            return answer_again
        secure = open_secure_visit(header, recipe, store, self._draw_secret())
        if secure is not None:
            if (answer_again := repeat_answer(store, secure.session)) is not None:
                return answer_again
            uploads = replace_secure_sum(uploads, secure.transform)
        if plan is not None:
            shared = algorithm.init(setting, network.initial_model()).shared
            prepared = None if secure is None else secure.transform
            check_planned_noise(plan, header, recipe, prepared, shared, data.class_counts)
        download = unpack_download(algorithm, uploads, setting, network, phase, payload, store)
        clients = data.as_only_client(client, clients_total)
        engine = LoopEngine(algorithm, network, clients, setting, uploads)
        # The server knows the run's seed. A secret that is new in every visit also stops it from asking twice for the
        # same noise on top of different gradients.
        engine.use_noise_seed(secrets.randbits(128))
        initial_state = uploads.initial_client_state(algorithm, download)
        last_accepted = header["last_accepted_round"]
        if not is_empty(initial_state):
            client_state = load_client_state(store, last_accepted, initial_state)
            if not is_empty(client_state):
                engine.restore_client_states({client: client_state})
        try:
            upload, _, client_state, _ = engine.visit_client(download, client)
        except OutOfRangeError as error:
            # The value itself stays at the site.
            LOG.error("%s", error)
            raise SiteRefusal(
                "its upload is out of the range of the secure sum: raise --transforms.secure-sum.largest, or lower the "
                "learning rate"
            ) from error
        if not is_empty(initial_state):
            save_client_state(store, phase.round, client_state, last_accepted)
        answer = {"kind": "visit", "round": phase.round}
        if not has_client_noise(recipe):
            answer |= _describe_counts(data)
        if secure is not None:
            return mask_upload(secure, client, upload, answer, store)
        packed = pack_payload(answer, {"mean": upload.mean, "pool": upload.pool})
        if protects_examples:
            store.save_payload(NOISED_ANSWER, packed)
        return packed

    def _unmask_sum(self, header: dict[str, Any], payload: Payload) -> Payload:
        return answer_unmasking(header, payload, self._open_state(header["run"]))

    def _evaluate_model(self, header: dict[str, Any], payload: Payload) -> Payload:
        requested, data = header["requested"], self._prepare_data(header)
        if SHARING_LEVELS.index(requested) > SHARING_LEVELS.index(self._policy.shared_scores):
            shared = self._policy.shared_scores
            raise SiteRefusal(f"the server asks for {requested}; this site shares {shared}", "disclosure.scores")
        if data.test is None and data.validation is None:
            raise SiteRefusal("the server asks for an evaluation; this site holds no test rows")
        network = self._build_network(header, data)
        model = rebuild_tree(unpack_tensors(payload)["model"], network.initial_model(), "model")
        answer, sent = {"kind": "evaluate", "round": header["round"]}, dict[str, tuple[Tensor, ...]]()
        withheld = dict[str, SiteRefusal]()
        for part, rows in (("test", data.test), ("validation", data.validation)):
            if rows is None:
                continue
            scores, labels = network.predict(model, rows.inputs).double(), rows.labels.double()
            positives = int((labels == 1).sum())
            site_auc = auc(labels, scores) if 0 < positives < len(labels) else None
            if part == "test":
                LOG.info("AUC of this site's %d test rows: %s", len(labels), site_auc)
                if self._report is not None:
                    self._report.add_evaluation(header["run"], header["round"], labels.numpy(), scores.numpy())
            try:
                kind = "held-out " if part == "test" else "validation "
                _check_counts((positives, len(labels) - positives), kind, self._policy.minimum_rows)
            except SiteRefusal as refusal:
                withheld[part] = refusal
                continue
            if part == "test" and self._policy.share_auc:
                answer["auc"] = site_auc
            sent[name_tensors(requested, part)] = (
                (count_score_bins(scores, labels),) if requested == "histograms" else (scores, labels)
            )
        if not sent:
            raise next(iter(withheld.values()))
        for part, reason in withheld.items():
            LOG.info("no scores of %s rows are sent: %s", part, reason)
        answer |= {"withheld": list(withheld)} if withheld else {}
        if not has_client_noise(_decode_recipe(header)):
            answer |= _describe_counts(data)
        return pack_payload(answer, sent)

    def _receive_model(self, header: dict[str, Any], payload: Payload) -> Payload:
        """Store the model of a finished run, and answer with its hash."""
        if self._model_folder is None:
            raise SiteRefusal("this site keeps no models; give it a folder for its state")
        data, recipe = self._prepare_data(header), _decode_recipe(header)
        network = self._build_network(header, data)
        model = rebuild_tree(unpack_tensors(payload)["model"], network.initial_model(), "model")
        config: ModelConfig = _decode_value(ModelConfig, header["model"], "model")
        delivered = DeliveredModel(network, model, recipe, None if self._build_model else config, header)
        folder = self._model_folder / str(header["run"])
        stored = store_model(delivered, data, folder)
        LOG.info("the model of run %s is in %s", header["run"], folder)
        return pack_payload({"kind": "deliver", "sha256": stored})

    def _build_network(self, header: dict[str, Any], data: SiteData) -> ModuleNetwork:
        recipe = _decode_recipe(header)
        config: ModelConfig = _decode_value(ModelConfig, header["model"], "model")
        shape = tuple(data.inputs.shape[1:])
        return _build_network(config, self._build_model, shape, (recipe.seed, recipe.dtype, recipe.precision))


@functools.lru_cache(maxsize=1)
def _build_network(
    config: ModelConfig, build_model: ModelBuilder | None, shape: tuple[int, ...], numerics: tuple[int, str, str]
) -> ModuleNetwork:
    """The network of a run. A resident worker keeps it, because a visit sets all of its weights and buffers anyway."""
    seed, dtype, precision = numerics
    module = (build_model or config.build)(shape, seed)
    return ModuleNetwork(module, DTYPES[dtype], Compute(mixed=precision == "mixed"))


def _check_counts(class_counts: tuple[int, int], kind: str, least: int) -> None:
    """Refuse to use so few rows of a class that an answer could show one of them."""
    for count, name in zip(class_counts, ("positives", "negatives"), strict=True):
        if 0 < count < least:
            reason = f"this site has {kind}{name}, but fewer than the {least} that its policy asks for"
            raise SiteRefusal(reason, "rows.minimum_per_class")


def _read_validation_fraction(header: dict[str, Any]) -> float:
    """The part of the training rows that the run holds out."""
    fraction = header.get("validation_fraction", 0.0)
    if type(fraction) not in (int, float) or not 0 <= fraction < 1:
        raise SiteRefusal(f"validation_fraction is {str(fraction)[:40]!r}; it must be at least 0 and below 1")
    return float(fraction)


def _describe_counts(data: SiteData) -> dict[str, Any]:
    return {"class_counts": data.class_counts}


def _repeat_noised_answer(store: SiteState, round: int, turn: int) -> Payload | None:
    """The answer that the site has given to this round, the same bytes again; None if it has not answered it.

    Several answers with other noise would let the server average the noise away. `turn` is the number of rounds of
    which a site answers one.
    """
    stored = store.load_payload(NOISED_ANSWER)
    answered = -1 if stored is None else int(stored.read_header()["round"])
    if answered == round:
        return stored
    if answered > round:
        raise SiteRefusal(f"this site has answered round {answered}; a second answer to round {round} costs privacy")
    if answered >= 0 and answered // turn == round // turn:
        raise SiteRefusal(f"this site has answered round {answered}; a second answer in its cycle costs privacy")
    return None


def answer_failure(error: Exception) -> Payload:
    """The answer that says why there is no other one.

    Of an unexpected error it tells the type alone, because an error message may quote rows.
    """
    if isinstance(error, MissingSiteState):
        return pack_payload({"kind": "missing-state", "what": str(error)})
    if isinstance(error, SiteRefusal):
        LOG.warning("%s", error)
        opening = {} if error.opens_in is None else {"opens_in": error.opens_in}
        return pack_payload({"kind": "refusal", "reason": str(error), **opening})
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
