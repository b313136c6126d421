"""Is a run folder what its run wrote? Hashes, the signature, and the result computed again from records and model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from fedauc.experiments.assembly import DTYPES
from fedauc.experiments.config import Config
from fedauc.experiments.evaluation import measure_columns, score_rows
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.manifest import (
    MANIFEST_FILE,
    SIGNATURE_FILE,
    check_signature,
    compare_with_manifest,
    import_cryptography,
    read_manifest,
)
from fedauc.experiments.runner import DataCache, PreparedData, assemble_run
from fedauc.files import naming_damage
from fedauc.metrics import group_auc, parse_metrics
from fedauc.network import Compute, ModuleNetwork

TOLERANCE = 1e-9
"""Largest difference of a metric that is computed again from the same scores."""

SCORE_TOLERANCE = 1e-4
"""Largest difference of a score, relative to their spread: other processors add in another order."""


class Finding(NamedTuple):
    """The outcome of one check: whether it passed, failed, or could not be made, and a sentence."""

    verdict: Literal["ok", "wrong", "not checked"]
    text: str


def verify_folder(path: Path, public_key: Path | None = None) -> list[Finding]:
    """All checks of a finished run folder, the cheap ones first."""
    folder = RunFolder(path)
    # A simulation has config.json; with a file more it must not pass for a run whose model cannot be checked.
    is_federation = (path / "federation.json").is_file() and not (path / "config.json").exists()
    if not is_federation:
        RunFolder.open(path)
    if not folder.done:
        advice = f"see `fedauc federation show {path}`" if is_federation else f"go on with `fedauc resume {path}`"
        raise ValueError(f"{path} is not finished: it has no result.json to verify; {advice}")
    findings = list(_check_files(path, public_key))
    checks = [_check_records] if is_federation else [_check_records, _check_scores, _check_model]
    for check in checks:
        try:
            with naming_damage(path):
                findings += check(folder)
        except (ValueError, OSError) as error:
            findings.append(Finding("wrong", str(error)))
    if is_federation:
        findings.append(Finding("not checked", "the model, because the rows that scored it stay at the sites"))
    return findings


def _check_files(path: Path, public_key: Path | None) -> Iterator[Finding]:
    """Compare every file with the manifest, and the manifest with its signature."""
    is_signed = (path / SIGNATURE_FILE).is_file()
    if is_signed or public_key is not None:
        # A missing package is no fault of the folder, so that it must not be reported as one.
        import_cryptography()
    if not (path / MANIFEST_FILE).is_file():
        verdict: Literal["wrong", "not checked"] = "wrong" if is_signed or public_key else "not checked"
        yield Finding(verdict, f"hashes of files, because there is no {MANIFEST_FILE}")
        return
    try:
        differences = compare_with_manifest(path)
    except ValueError as error:
        yield Finding("wrong", str(error))
        return
    for name in differences.changed:
        yield Finding("wrong", f"{name} is not the file that {MANIFEST_FILE} lists")
    for name in differences.missing:
        yield Finding("wrong", f"{name} is missing")
    for name in differences.unlisted:
        # A page that was written later is no damage, but nobody has vouched for it.
        yield Finding("wrong" if is_signed else "not checked", f"{name}, which {MANIFEST_FILE} does not list")
    if not differences.changed and not differences.missing:
        yield Finding("ok", f"all {len(read_manifest(path))} files have the hashes of {MANIFEST_FILE}")
    if is_signed or public_key is not None:
        try:
            fingerprint = check_signature(path, public_key)
        except ValueError as error:
            yield Finding("wrong", str(error))
            return
        yield Finding("ok", f"{MANIFEST_FILE} is signed by the key {fingerprint}")
        if public_key is None:
            yield Finding("not checked", "whose key that is; give --public-key")
    else:
        yield Finding("not checked", "who wrote the files, because they are not signed")


def _check_records(folder: RunFolder) -> Iterator[Finding]:
    """The result's last record must be the one of that round."""
    final, records = folder.read_result()["final"], folder.read_records()
    rounds = [record["round"] for record in records]
    if rounds != sorted(set(rounds)):
        yield Finding("wrong", "the rounds of records.jsonl do not rise")
    if final is None:
        yield Finding("not checked", "the last record, because the run was not evaluated")
        return
    if not (folder.path / "records.jsonl").is_file():
        # The manifest has named the missing file already.
        has_manifest = (folder.path / MANIFEST_FILE).is_file()
        yield Finding("not checked" if has_manifest else "wrong", "the records, because records.jsonl is missing")
        return
    record = next((record for record in records if record["round"] == final["round"]), None)
    moment = f"after {final['round'] + 1} rounds"
    which = "the last" if final["round"] == records[-1]["round"] else "one"
    if record is None:
        yield Finding("wrong", f"records.jsonl has no record of the model in result.json, {moment}")
    elif record != final:
        yield Finding("wrong", f"result.json differs from the record in records.jsonl {moment}")
    else:
        yield Finding("ok", f"result.json agrees with {which} of {len(records)} records ({moment})")


def _check_scores(folder: RunFolder) -> Iterator[Finding]:
    """Compute the metrics of the last record again from the stored scores of the test rows."""
    result, config = folder.read_result(), folder.config
    if not folder.has_scores:
        is_withheld = "scores" in result.get("not_released", {})
        reason = "because a private run does not release them" if is_withheld else "because scores.npz is missing"
        yield Finding("not checked" if is_withheld else "wrong", f"the scores of test rows, {reason}")
        return
    with (folder.path / "scores.npz").open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
    labels, scores = arrays["labels"], arrays["scores"]
    expected = _measure_again(config, labels, scores)
    if result.get("client_auc") and "clients" in arrays:
        again = group_auc(labels, scores, arrays["clients"])
        expected |= {f"AUC of client {name}": value for name, value in again.items()}
    stored_values = {**result["final"], **{f"AUC of client {n}": v for n, v in result.get("client_auc", {}).items()}}
    different = [name for name, value in expected.items() if not _is_close(stored_values.get(name), value)]
    for name in different:
        yield Finding(
            "wrong", f"{name} is {stored_values.get(name)} in result.json, but {expected[name]} of scores.npz"
        )
    if not different:
        yield Finding("ok", f"{len(expected)} values of result.json follow from the {len(labels)} scores of scores.npz")


def _measure_again(config: Config, labels: np.ndarray, scores: np.ndarray) -> dict[str, Any]:
    """The columns of a record that metrics make of scores."""
    columns: dict[str, Any] = {}
    for metric in parse_metrics(config.metrics):
        columns |= measure_columns(metric, labels, scores)
    return columns


def _check_model(folder: RunFolder) -> Iterator[Finding]:
    """Score the test rows again with the stored model, if their files are here and are those of the run."""
    config = folder.config
    if not folder.has_scores:
        return
    try:
        secret = folder.read_secret() if config.recipe.noise_source == "secret" else None
        data, assembly = assemble_run(config, DataCache(), secret)
        folder.check_data(data.fingerprint)
    except (ValueError, OSError) as error:
        yield Finding("not checked", f"the scores of the model, because its data are not here: {error}")
        return
    if assembly.training.algorithm.has_personal_models:
        yield Finding("not checked", "the scores of the model, because clients have parts of it")
        return
    scores, again = folder.read_scores()[1], _score_again(folder.path, config, data)
    spread = float(np.std(scores)) or 1.0
    if scores.shape != again.shape or not np.allclose(again, scores, rtol=0, atol=SCORE_TOLERANCE * spread):
        yield Finding("wrong", "the stored model gives the test rows other scores than scores.npz has")
        return
    yield Finding("ok", f"the stored model gives the {len(scores)} test rows the scores of scores.npz")


def _score_again(path: Path, config: Config, data: PreparedData) -> np.ndarray:
    """The scores of the test rows by the model in `model.pt`."""
    recipe, (_, test) = config.recipe, data.held_out_examples(config.recipe.device)
    weights = torch.load(path / "model.pt", map_location="cpu", weights_only=True)
    module = config.model.build(tuple(data.split.train.inputs.shape[1:]), recipe.seed)
    module.load_state_dict(weights)
    compute = Compute(recipe.device, recipe.precision == "mixed")
    network = ModuleNetwork(module, DTYPES[recipe.dtype], compute)
    return score_rows(network, network.initial_model(), test.inputs)


def _is_close(stored: Any, again: Any) -> bool:
    if not isinstance(stored, (int, float)) or not isinstance(again, (int, float)):
        return bool(stored == again)
    return math.isclose(stored, again, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
