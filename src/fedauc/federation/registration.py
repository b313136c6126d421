"""What every site tells the server before a run: its class counts, the shape of its rows, and a key for secure sums."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch

from fedauc.data.clients import Clients
from fedauc.experiments.private_training import has_client_noise
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.secure_training import find_secure_sum
from fedauc.federation.agreement import FederationAgreement
from fedauc.federation.data_agreement import AgreedData, agree_on_data, agreement_header, report_failures
from fedauc.federation.exchange import LOG, AnswerRefused, Exchange, describe_missing_sites, read_answer
from fedauc.federation.membership import TableChange
from fedauc.federation.run_plan import describe_plan, describe_validation
from fedauc.federation.schema import DataSchema
from fedauc.federation.serialization import Payload, pack_payload
from fedauc.federation.site_data import ROW_TYPES
from fedauc.federation.versions import find_setting_problem
from fedauc.guards import TrainingStopped
from fedauc.interfaces import Census
from fedauc.privacy.ciphers import KEY_BYTES

CENSUS_FILE = "census.json"
"""The file of a run's folder that holds what the sites registered."""


SWAPPED_SHARE = 0.3
"""Positives are few below this share, and most of the rows where negatives are."""


class RegisteredSites(NamedTuple):
    """What the server knows of all sites' data. The run's id separates the states that sites keep for several runs."""

    run_id: str
    census: Census
    shape: tuple[int, ...]
    dtype: str
    public_keys: Mapping[int, str] = MappingProxyType({})
    """With secure sums, the key of every client, as hexadecimal text."""
    agreed: AgreedData | None = None
    """How rows are prepared, where the federation has a schema."""
    missing: Mapping[str, str] = MappingProxyType({})
    """The sites that take no part because they have not registered, and why; known when the run begins."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for census.json."""
        counts = {"positives": self.census.positives.tolist(), "negatives": self.census.negatives.tolist()}
        keys = {"public_keys": {str(client): key for client, key in self.public_keys.items()}}
        rows = {"shape": list(self.shape), "dtype": self.dtype}
        agreed = {} if self.agreed is None else {"preparation": self.agreed.to_json()}
        return {"run": self.run_id, **counts, **rows, **(keys if self.public_keys else {}), **agreed}

    @staticmethod
    def read_json(folder: Path) -> RegisteredSites:
        """Read census.json of a run's folder."""
        stored = json.loads((folder / CENSUS_FILE).read_text())
        census = Census(np.array(stored["positives"]), np.array(stored["negatives"]))
        public_keys = {int(client): key for client, key in stored.get("public_keys", {}).items()}
        agreed = AgreedData.from_json(stored["preparation"]) if "preparation" in stored else None
        return RegisteredSites(stored["run"], census, tuple(stored["shape"]), stored["dtype"], public_keys, agreed)

    def placeholder_clients(self, census: Census, groups: np.ndarray | None = None) -> Clients:
        """Clients with these class counts and two rows of zeros, a positive and a negative, to try the model on."""
        inputs = torch.zeros((2, *self.shape), dtype=ROW_TYPES[self.dtype])
        names = np.arange(len(census.positives))
        offsets = np.concatenate([[0], np.full(len(names), 2)])
        return Clients(inputs, torch.tensor([1.0, 0.0]), np.arange(2), offsets, census, names, groups)


def register_sites(
    exchange: Exchange,
    recipe: Recipe | None = None,
    schema: DataSchema | None = None,
    plan: Mapping[str, Any] | None = None,
) -> RegisteredSites:
    """Ask every site for its class counts; a site that does not answer counts as one without rows in this run.

    `plan` is what a site's owner approves. With a schema, every site first checks its table, and the preparation of
    rows is agreed on. For secure sums, sites also send their keys of the run. Where clients add the noise, they hide
    their class counts: a site with rows then counts as one with a row of each class.
    """
    run_id, asks_key = secrets.token_hex(8), recipe is not None and find_secure_sum(recipe) is not None
    hides_counts = recipe is not None and has_client_noise(recipe)
    seconds, names = exchange.policy.registration_deadline, [site.name for site in exchange.sites]
    fraction = exchange.policy.validation_fraction
    proposal: dict[str, Any] = {"run": run_id} if plan is None else {"run": run_id, "plan": plan}
    proposal |= describe_validation(fraction)
    header = {**proposal, "kind": "register", "secure_sum": asks_key, "hides_counts": hides_counts}
    agreed, failed, summed_rows = None, dict[int, str](), dict[int, int]()
    if schema is not None:
        is_private = recipe is not None and recipe.is_private
        proposed = proposal | agreement_header(schema, None)
        agreed, failed, summed_rows = agree_on_data(exchange, schema, proposed, is_private)
        header |= agreement_header(schema, agreed)
    messages = {
        client: lambda name=name: pack_payload({**header, "site": name})
        for client, name in enumerate(names)
        if client not in failed
    }
    result = exchange.ask_sites(
        messages,
        lambda client, payload: _read_registration(payload, asks_key, hides_counts, fraction, summed_rows.get(client)),
        seconds=seconds,
    )
    report_failures(exchange, result)
    reasons = {**failed, **result.absent, **result.refused}
    missing = {names[client]: reason for client, reason in sorted(reasons.items())}
    if not result.answers:
        raise TrainingStopped(f"no site has answered within {seconds:g} s{describe_missing_sites(missing)}")
    first = min(result.answers)
    _, first_shape, first_dtype, _ = result.answers[first]
    counts = np.zeros((2, len(names)), dtype=np.int64)
    for client, (class_counts, shape, dtype, _) in sorted(result.answers.items()):
        if (shape, dtype) != (first_shape, first_dtype):
            shapes = f"has rows {dtype} {shape}, site {names[first]!r} has {first_dtype} {first_shape}"
            raise ValueError(f"site {names[client]!r} {shapes}; give all sites the same features")
        counts[:, client] = class_counts
    if not counts.sum(axis=1).all():
        held = f"the sites hold {counts[0].sum()} positives and {counts[1].sum()} negatives; both are needed"
        raise ValueError(f"{held}{describe_missing_sites(missing)}")
    if not hides_counts:
        for warning in warn_of_labels(names, counts):
            LOG.warning("%s", warning)
    public_keys = {client: key for client, (*_, key) in sorted(result.answers.items()) if key}
    return RegisteredSites(run_id, Census(*counts), first_shape, first_dtype, public_keys, agreed, missing)


def warn_of_labels(names: Sequence[str], counts: np.ndarray) -> list[str]:
    """Sites where positives are most of the rows, while they are few elsewhere: their labels may be swapped.

    `counts` holds the positives and the negatives of every site. Sites with rows of one class say nothing.

    >>> warn_of_labels(["north", "east", "south"], np.array([[9, 8, 90], [91, 92, 10]]))
    ["site 'south' has 90 % positives, and the median site 9 %; are its labels swapped?"]
    """
    both = [client for client in range(len(names)) if counts[:, client].min() > 0]
    shares = [float(counts[0, client] / counts[:, client].sum()) for client in both]
    median = float(np.median(shares)) if len(shares) > 1 else 1.0
    return [
        f"site {names[client]!r} has {100 * share:.0f} % positives, and the median site {100 * median:.0f} %; "
        "are its labels swapped?"
        for client, share in zip(both, shares, strict=True)
        if median < SWAPPED_SHARE and share > 1 - SWAPPED_SHARE
    ]


def register_joining_sites(
    exchange: Exchange, agreement: FederationAgreement, registered: RegisteredSites, change: TableChange
) -> dict[int, list[int]]:
    """The class counts of the sites that join a run.

    One that does not answer within a round's deadline may do so when the run is resumed again.
    """
    header: dict[str, Any] = {"run": registered.run_id, "plan": describe_plan(agreement), "kind": "register"}
    fraction = agreement.policy.validation_fraction
    header |= {"secure_sum": False, "hides_counts": False, **describe_validation(fraction)}
    if agreement.schema is not None:
        header |= agreement_header(agreement.schema, registered.agreed)
    exchange = dataclasses.replace(exchange, sites=change.members.sites)
    names = change.members.names
    result = exchange.ask_sites(
        {client: lambda name=names[client]: pack_payload({**header, "site": name}) for client in change.joining},  # type: ignore[misc]
        lambda client, payload: _read_registration(payload, False, False, fraction),
    )
    report_failures(exchange, result)
    for client, (_, shape, dtype, _) in result.answers.items():
        if (shape, dtype) != (registered.shape, registered.dtype):
            expected = f"the run has {registered.dtype} {registered.shape}"
            raise ValueError(f"site {names[client]!r} has rows {dtype} {shape}, {expected}; give it the same features")
    for client, reason in result.absent.items():
        LOG.warning("site %r has not joined: it %s; resume the run again when it is online", names[client], reason)
    return {client: answer.class_counts for client, answer in result.answers.items()}


class Registration(NamedTuple):
    """A site's number of rows of each class, the shape of a row, the type of rows, and its key in hexadecimal."""

    class_counts: list[int]
    shape: tuple[int, ...]
    dtype: str
    public_key: str


def _read_registration(
    payload: Payload,
    asks_key: bool,
    hides_counts: bool,
    validation_fraction: float,
    summed_rows: int | None = None,
) -> Registration:
    """A site's registration, whose class counts must be those of the rows that it has reported sums of."""
    header = read_answer(payload, "register")
    if problem := find_setting_problem(header, validation_fraction):
        raise AnswerRefused(problem)
    counts, shape, dtype = (header.get(key) for key in ("class_counts", "shape", "dtype"))
    if hides_counts:
        counts = [int(header.get("has_rows") is True)] * 2
    if not _are_integers(counts, minimum=0) or len(counts) != 2:
        raise ValueError(f"class_counts is {counts!r}; it must be two counts")
    if summed_rows and sum(counts) != summed_rows:
        raise ValueError(f"class_counts is {counts!r}, but the sums that it has sent are of {summed_rows} rows")
    if not _are_integers(shape, minimum=1) or not shape or dtype not in ROW_TYPES:
        raise ValueError(f"a row is {dtype!r} {shape!r}; it must be {' or '.join(ROW_TYPES)}, with sizes of at least 1")
    key = str(header.get("public_key", "")) if asks_key else ""
    if asks_key and len(bytes.fromhex(key)) != KEY_BYTES:
        raise ValueError(f"public_key is {key!r}; it must be {KEY_BYTES} bytes in hexadecimal")
    return Registration(counts, tuple(shape), str(dtype), key)


def _are_integers(values: Any, minimum: int) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= minimum for value in values)
