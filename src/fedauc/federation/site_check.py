"""A dry run at a site, before anything is sent: table, policy, versions, disk, certificate, key, clock, test round."""

from __future__ import annotations

import datetime
import email.utils
import http.client
import importlib.metadata
import os
import shutil
import ssl
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedauc.experiments.recipe import Recipe
from fedauc.federation.agreement import FederationAgreement, ServerPolicy, SiteEntry
from fedauc.federation.audit_log import LOG_FILE, verify_log
from fedauc.federation.certificate_renewal import EXPIRY_DAYS, list_certificates
from fedauc.federation.exchange import Exchange
from fedauc.federation.in_process import InProcessGrid
from fedauc.federation.owner_policy import OwnerPolicy
from fedauc.federation.schema import DataSchema, describe_problems
from fedauc.federation.server import FederatedRun
from fedauc.federation.site import Site
from fedauc.federation.site_data import split_rows
from fedauc.federation.site_state import FolderSiteState
from fedauc.federation.site_table import SiteTable
from fedauc.federation.versions import FLOWER_REQUIREMENT, FLOWER_VERSIONS
from fedauc.files import check_writable
from fedauc.guards import TrainingStopped
from fedauc.version import VERSION

LEAST_FREE_BYTES = 1 << 30

MAX_CLOCK_SECONDS = 60.0
"""A clock that is further from the server's is reported: hours of operation and certificates depend on it."""

CONNECT_SECONDS = 10.0


class CheckResult(NamedTuple):
    """One part of the dry run: whether it is all right, and a line about it."""

    part: str
    is_ok: bool
    text: str


class SiteSetup(NamedTuple):
    """What a site is started with; parts that are None are not checked."""

    data: Path
    state: Path
    schema: Path | None = None
    policy: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server: str = ""


def check_site(setup: SiteSetup) -> list[CheckResult]:
    """Every part of the dry run; none of them changes the site's state, and nothing leaves the site."""
    schema = (
        None if setup.schema is None else _read_or_report("schema", lambda: DataSchema.read_toml(_need(setup.schema)))
    )
    policy = (
        None if setup.policy is None else _read_or_report("policy", lambda: OwnerPolicy.read_toml(_need(setup.policy)))
    )
    results = [result for result in (schema, policy) if isinstance(result, CheckResult)]
    agreed = schema if isinstance(schema, DataSchema) else None
    rules = policy if isinstance(policy, OwnerPolicy) else OwnerPolicy()
    if isinstance(policy, OwnerPolicy):
        results.append(CheckResult("policy", True, f"{setup.policy}; runs: approval {rules.runs.approval}"))
    if agreed is not None:
        results += _check_table(setup, agreed, rules)
    results.append(_check_versions(agreed))
    results.append(_check_disk(setup))
    if setup.certificate is not None:
        results.append(_check_certificate(setup.certificate))
    if setup.key is not None:
        results.append(_check_key(setup.key))
    if setup.server and setup.certificate is not None:
        results += _check_server(setup.server, setup.certificate)
    elif setup.server:
        results.append(CheckResult("server", False, f"{setup.server} is not asked without --certificate; give it too"))
    if (setup.state / LOG_FILE).exists() and (problem := verify_log(setup.state).problem):
        results.append(CheckResult("audit log", False, f"{problem}; keep it, and start with another state folder"))
    if agreed is not None and all(result.is_ok for result in results if result.part in ("schema", "rows")):
        results.append(_try_round(setup, agreed, rules))
    return results


def _need(path: Path | None) -> Path:
    assert path is not None
    return path


def _read_or_report(part: str, read: Callable[[], DataSchema | OwnerPolicy]) -> DataSchema | OwnerPolicy | CheckResult:
    try:
        return read()
    except ValueError as error:
        return CheckResult(part, False, str(error))


def _check_table(setup: SiteSetup, schema: DataSchema, policy: OwnerPolicy) -> list[CheckResult]:
    """The table against the schema, and its class counts against the policy."""
    source = SiteTable.from_file(setup.data, setup.state)
    table, problems = source.find_problems(schema)
    if table is None:
        return [CheckResult("schema", False, line) for line in describe_problems(problems, is_private=True)]
    names = f"{len(table.columns)} columns and the label {schema.label!r} fit the schema"
    results, least = [CheckResult("schema", True, names)], policy.rows.minimum_per_class
    for part, indices in zip(("train on", "hold out"), split_rows(table.labels, source.test_fraction), strict=True):
        positives = int((table.labels[indices] == 1).sum())
        negatives = len(indices) - positives
        is_enough = bool(len(indices)) and all(count == 0 or count >= least for count in (positives, negatives))
        text = f"{positives} positives and {negatives} negatives to {part}"
        if not is_enough:
            text += f"; the policy asks for {least} of a class"
        # A site that sends no scores takes part nevertheless.
        if not is_enough and part == "hold out":
            text += ", so that no scores are sent and the site is not evaluated"
        results.append(CheckResult("rows", is_enough or part == "hold out", text))
    return results


def _check_versions(schema: DataSchema | None) -> CheckResult:
    try:
        flower = importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError:
        flower = "not installed"
    text = f"fedauc {VERSION}, flwr {flower}"
    if schema is not None and schema.fedauc.split(".")[:2] != VERSION.split(".")[:2]:
        return CheckResult("versions", False, f"{text}; the schema was made with fedauc {schema.fedauc}: install that")
    if not flower.startswith(FLOWER_VERSIONS):
        known = " or ".join(FLOWER_VERSIONS)
        return CheckResult("versions", False, f"{text}; a site needs flwr {known}: pip install '{FLOWER_REQUIREMENT}'")
    return CheckResult("versions", True, text)


def _check_disk(setup: SiteSetup) -> CheckResult:
    try:
        check_writable(setup.state / "probe")
    except ValueError as error:
        return CheckResult("disk", False, str(error))
    folder = next(path for path in (setup.state.absolute(), *setup.state.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    size = setup.data.stat().st_size if setup.data.is_file() else 0
    needed = max(LEAST_FREE_BYTES, 4 * size)
    text = f"{free / 1e9:.1f} GB free for {setup.state}"
    return CheckResult("disk", free >= needed, text if free >= needed else f"{text}; {needed / 1e9:.1f} are needed")


def _check_certificate(path: Path) -> CheckResult:
    """The authorities' certificates: readable, and one of them valid today and for a while."""
    try:
        entries = list_certificates(path)
    except ValueError as error:
        return CheckResult("certificate", False, f"{error}; get ca.pem from the server")
    now, last = datetime.datetime.now(datetime.UTC), max(entries, key=lambda entry: entry.end)
    if now < last.begin:
        return CheckResult(
            "certificate", False, f"{path} is valid from {last.begin:%Y-%m-%d %H:%M} on; is the clock right?"
        )
    count = f"; it lists {len(entries)} authorities" if len(entries) > 1 else ""
    text = f"{path} is valid until {last.end:%Y-%m-%d}{count}"
    is_lasting = last.days_left(now) >= EXPIRY_DAYS
    return CheckResult("certificate", is_lasting, text if is_lasting else f"{text}; renew it")


def _check_key(path: Path) -> CheckResult:
    """The site's private key: readable for its owner, and for nobody else."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    remedy = "create it with ssh-keygen -t ecdsa -b 384"
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), password=None)
        mode = stat.S_IMODE(path.stat().st_mode)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        return CheckResult("key", False, f"{path} cannot be read ({error}); {remedy}")
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        return CheckResult("key", False, f"{path} is another kind of key, which Flower refuses; {remedy}")
    if os.name == "posix" and mode & 0o077:
        return CheckResult("key", False, f"{path} can be read by others (mode {mode:o}); run chmod 600 {path}")
    return CheckResult("key", True, f"{path} is a private key that only its owner can read")


def _check_server(server: str, certificate: Path) -> list[CheckResult]:
    """Whether the server can be reached with that certificate, and how far its clock is from ours."""
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal():
        return [CheckResult("server", False, f"server is {server!r}; write HOST:PORT")]
    try:
        trusted = ssl.create_default_context(cafile=str(certificate))
        connection = http.client.HTTPSConnection(host, int(port), timeout=CONNECT_SECONDS, context=trusted)
        connection.connect()
        # The certificate, because the connection may be closed together with the answer.
        expires = ssl.cert_time_to_seconds(str((connection.sock.getpeercert() or {})["notAfter"]))
        connection.request("GET", "/health")
        response = connection.getresponse()
        received, date = time.time(), response.getheader("Date")
        connection.close()
    except (OSError, http.client.HTTPException) as error:
        return [CheckResult("server", False, f"{server} cannot be reached: {error}")]
    days = int((expires - received) // 86400)
    text = f"{server} answers, and its certificate is trusted for {days} more days"
    if days < EXPIRY_DAYS:
        text += f"; {EXPIRY_DAYS} are needed: tell the coordinator to renew it"
    results = [CheckResult("server", days >= EXPIRY_DAYS, text)]
    if date is None:
        return [*results, CheckResult("clock", True, "the server does not tell its time; the certificate is valid now")]
    clock_offset = received - email.utils.parsedate_to_datetime(date).timestamp()
    text = f"{abs(clock_offset):.0f} s {'ahead of' if clock_offset > 0 else 'behind'} the server's"
    return [*results, CheckResult("clock", abs(clock_offset) <= MAX_CLOCK_SECONDS, text)]


def _try_round(setup: SiteSetup, schema: DataSchema, policy: OwnerPolicy) -> CheckResult:
    """A cycle of training with this site alone, in this process and in a temporary folder."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        table = SiteTable.from_file(setup.data, Path(folder) / "cache")
        if len(np.unique(table.check_schema(schema, "this-site").labels)) == 1:
            text = "not tried, because all rows are of one class; the site can train with others, but gets no model"
            return CheckResult("test round", True, f"{text}, whose threshold needs both")
        site = Site(lambda: table, lambda run: FolderSiteState(Path(folder) / run), policy.to_site_policy())
        evaluation = "none" if policy.disclosure.scores == "nothing" else "histograms"
        agreement = FederationAgreement(
            recipe=Recipe.of("cycp-minimax", cycles=1),
            sites=(SiteEntry("this-site"),),
            policy=ServerPolicy(poll_interval=0.001, evaluation=evaluation),  # type: ignore[arg-type]
            schema=schema,
        )
        exchange = Exchange(InProcessGrid({"this-site": site}), agreement.sites, agreement.policy)
        try:
            result = FederatedRun.create(agreement, exchange, Path(folder) / "run").train_to_end()
        except (ValueError, TrainingStopped) as error:
            return CheckResult("test round", False, str(error).replace("site 'this-site': ", ""))
    seconds, final = time.monotonic() - started, result["final"]["auc"]
    quality = "" if final is None else f"; held-out AUC {final:.3f} after one cycle, which stays here"
    return CheckResult("test round", True, f"prepared and trained in {seconds:.1f} s{quality}")
