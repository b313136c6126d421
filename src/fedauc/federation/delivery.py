"""The end of a run: every site receives the model, and keeps it with its preparation, thresholds and a model card.

The server sends the weights with their hash. A site checks the hash, chooses calibration and thresholds by its own
training rows, which do not leave, writes a folder that `fedauc predict` reads, loads it again, and answers with the
hash of what it has loaded. Sites that were offline receive the model when the finished run is resumed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedauc.data.dataset import LABEL_VALUES
from fedauc.data.features import FeatureEncoder
from fedauc.experiments.folder import describe_environment
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.saved_model import describe_settings, score_reference_rows
from fedauc.federation.exchange import LOG as SERVER_LOG
from fedauc.federation.exchange import AnswerRefused, Exchange, decline_when_closed, read_answer
from fedauc.federation.schema import DataSchema
from fedauc.federation.serialization import Payload, pack_payload
from fedauc.federation.site_data import SiteData
from fedauc.federation.site_state import SiteRefusal
from fedauc.files import DAMAGE_ERRORS, make_folder, move_folder, write_atomically
from fedauc.interfaces import Model
from fedauc.metrics import auc
from fedauc.models.model import ModelConfig
from fedauc.network import ModuleNetwork
from fedauc.scoring.model_card import CardFacts, MetricOnTest, PartSize, write_model_card
from fedauc.scoring.scorer import load, make_scorer

LOG = logging.getLogger("fedauc.site")

DELIVERY_FILE = "delivery.json"
"""In a run's folder: which sites have the model. In a site's model folder: where it comes from, and its hashes."""

MODEL_FOLDER = "models"
"""The folder of models in a site's state folder."""


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of named tensors: names, types, shapes and bytes, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return digest.hexdigest()


# -------------------------------------------------------------------------------------------------------- the server


def deliver_model(
    exchange: Exchange,
    header: Mapping[str, Any],
    model: Model,
    digest: str,
    delivered: Mapping[str, str],
    excluded: Mapping[int, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Send the model to the sites that are online and do not have it; returns all sites' status by their names.

    `excluded` are sites that are sent nothing, with the reason.
    """
    names = [site.name for site in exchange.sites]
    members = [name for client, name in enumerate(names) if client not in exchange.left]
    status = {name: delivered.get(name, "is offline") for name in members}
    waiting = {client for client in exchange.online_sites() if status[names[client]] != "delivered"} - set(excluded)
    reasons = {names[client]: reason for client, reason in excluded.items() if client not in exchange.left}
    status |= {name: reason for name, reason in reasons.items() if status[name] != "delivered"}

    def pack_message(name: str) -> Payload:
        return pack_payload({**header, "kind": "deliver", "site": name, "sha256": digest}, {"model": model})

    result = exchange.ask_sites(
        {client: lambda client=client: pack_message(names[client]) for client in sorted(waiting)},  # type: ignore[misc]
        decline_when_closed(lambda client, payload: _read_receipt(payload, digest)),
    )
    status |= {names[client]: "delivered" for client in result.answers}
    status |= {names[client]: reason for client, reason in {**result.absent, **result.refused}.items()}
    for name, text in status.items():
        if text != "delivered":
            SERVER_LOG.warning("site %r has not received the model: %s; resume the run to send it again", name, text)
    return status


def _read_receipt(payload: Payload, digest: str) -> None:
    received = read_answer(payload, "deliver").get("sha256")
    if received != digest:
        raise AnswerRefused(f"it has stored a model with hash {str(received)[:12]}; the run's is {digest[:12]}")


# ---------------------------------------------------------------------------------------------------------- the site


class DeliveredModel(NamedTuple):
    """What a site makes a model folder of. `config` is None where the app builds its own model."""

    network: ModuleNetwork
    model: Model
    recipe: Recipe
    config: ModelConfig | None
    header: Mapping[str, Any]


def store_model(delivered: DeliveredModel, data: SiteData, folder: Path) -> str:
    """Write the model's folder, completely or not at all, load it again, and return the hash of what was loaded."""
    network, header = delivered.network, delivered.header
    module = network.build_module(delivered.model)
    digest = hash_tensors(module.state_dict())
    if digest != header["sha256"]:
        raise SiteRefusal(f"the model has the hash {digest[:12]}; the server says {str(header['sha256'])[:12]}")
    clients = data.as_only_client(0, 1)
    reference = score_reference_rows(network, delivered.model, clients, None, delivered.recipe.seed)
    if reference is None:
        raise SiteRefusal("the model gives embeddings, not scores: this site stores none")
    encoder, schema, label_values = None, None, LABEL_VALUES
    if "schema" in header:
        encoder, schema = FeatureEncoder.from_document(header["encoder"]), DataSchema.from_header(header["schema"])
        label_values = schema.label_values
    example = network.cast_inputs(data.inputs[:1]).cpu()
    try:
        reference = reference._replace(part="site's training")
        scorer = make_scorer(module, delivered.config, example, reference, encoder, label_values)
    except ValueError as error:
        LOG.error("the model is not stored, because %s", error)
        raise SiteRefusal("a threshold needs rows of both classes to train on, which this site has not") from error
    if schema is not None:
        scorer = replace(scorer, ranges=schema.ranges)
    # A site has one process at a time; what a killed one has left is removed by the next.
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    make_folder(part, 0o700)
    scorer.save(part)
    write_model_card(part, scorer, _describe_facts(delivered, data))
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(part.iterdir())}
    origin = {"run": header["run"], "round": header["round"], "sha256": digest, "files": files}
    write_atomically(part / DELIVERY_FILE, f"{json.dumps(origin, indent=2)}\n".encode())
    stored = hash_tensors(load(part).module.state_dict())
    shutil.rmtree(folder, ignore_errors=True)
    move_folder(part, folder)
    return stored


def verify_model(folder: Path) -> list[str]:
    """The files of a delivered model that are not as they were written; thresholds may be chosen anew."""
    path = folder / DELIVERY_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no delivered model: it has no {DELIVERY_FILE}; give a folder in models/")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        expected, digests = stored["sha256"], dict(stored["files"])
    except (*DAMAGE_ERRORS, ValueError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}); resume the run to get the model again"
        ) from error
    changed = [
        name
        for name, digest in digests.items()
        if not (folder / name).is_file() or hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest
    ]
    if hash_tensors(load(folder).module.state_dict()) != expected:
        raise ValueError(f"{folder} holds another model than the one that was delivered; ask for it again")
    return changed


def read_delivered_round(folder: Path) -> int | None:
    """The round of the model in a folder; None if none was delivered, or its list of files is damaged."""
    try:
        return int(json.loads((folder / DELIVERY_FILE).read_text(encoding="utf-8"))["round"])
    except (OSError, ValueError, *DAMAGE_ERRORS):
        return None


def _describe_facts(delivered: DeliveredModel, data: SiteData) -> CardFacts:
    """The card of a site's copy: the settings of the run, and what this site's rows say."""
    header, recipe = delivered.header, delivered.recipe
    settings = {name: value for name, value in describe_settings(recipe).items() if name != "participation"}
    settings["saved after round"] = int(header["round"]) + 1
    parts, metrics, tested = [PartSize.of("training, this site", data.training_labels)], list[MetricOnTest](), None
    if data.validation is not None:
        parts.append(PartSize.of("validation, this site", data.validation.labels.numpy()))
    if data.test is not None and len(data.test.labels):
        labels = data.test.labels.numpy()
        scores = delivered.network.predict(delivered.model, data.test.inputs).double().numpy()
        parts.append(PartSize.of("held out, this site", labels))
        if 0 < labels.sum() < len(labels):
            metrics.append(MetricOnTest("AUC, this site's held-out rows", float(auc(labels, scores))))
            tested = (labels, scores)
    if isinstance(header.get("federation_auc"), float):
        metrics.append(MetricOnTest("AUC, held-out rows of all sites that share scores", header["federation_auc"]))
    return CardFacts(
        data=f"Rows of a federation, run {header['run']}; the numbers below are this site's",
        model=type(delivered.network.plain_module).__name__ if delivered.config is None else delivered.config.name,
        method=recipe.method,
        sites=int(header["class_totals"][0]),
        parts=parts,
        settings=settings,
        metrics=metrics,
        test=tested,
        limits=["Calibration and thresholds come from the training rows of this site alone."],
        environment=describe_environment(),
        is_simulated=False,
        test_note="Measured on held-out rows, which neither training nor the choice of a threshold has used.",
    )
