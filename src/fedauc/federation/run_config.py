"""A run as a flat set of settings, which is what a message service passes to its server: read, start or resume it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from fedauc.experiments.config import to_plain
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.options import build_config, list_options, parse_value
from fedauc.federation.agreement import FederationAgreement, ServerPolicy, SiteEntry, read_sites
from fedauc.federation.exchange import LOG, Exchange, Grid
from fedauc.federation.large_messages import prepare_for_large_messages
from fedauc.federation.schema import DataSchema
from fedauc.federation.server import AGREEMENT_FILE, FederatedRun, write_failure
from fedauc.federation.site import ModelBuilder
from fedauc.guards import TrainingStopped

LOCK_SECONDS = 60.0
"""How long a server waits for the run's folder: a server that has outlived its message service ends in that time."""

APP_KEYS = ("method", "out", "sites", "schema", "resume", "options")
"""Keys of the run configuration that are neither fields of the server's policy nor options of the command line."""


def serve_run(
    grid: Grid,
    config: Mapping[str, Any],
    build_model: ModelBuilder | None = None,
    normalize_key: Callable[[str], str] = lambda key: key,
) -> None:
    """Start the run that the run configuration describes, or resume it, and train it to its end.

    `normalize_key` gives the key of a row of the site table the form that the message service uses.
    """
    prepare_for_large_messages()
    out = _read_absolute_path("out", config)
    is_resumed = bool(config.get("resume"))
    if is_resumed and not (out / AGREEMENT_FILE).is_file():
        raise ValueError(f"{out} is no federated run: it has no {AGREEMENT_FILE}; give the out of the run to resume")
    try:
        agreement = read_run_config(config, read_sites(_read_absolute_path("sites", config)))
        sites = tuple(dataclasses.replace(site, key=normalize_key(site.key)) for site in agreement.sites)
        if is_resumed:
            requested, agreement = agreement, FederationAgreement.read_json(out / AGREEMENT_FILE)
            if differences := list_differences(agreement, requested):
                LOG.warning("the run keeps the settings that it began with: %s", "; ".join(differences))
        exchange = Exchange(grid, sites, agreement.policy)
        if not is_resumed:
            FederatedRun.create(agreement, exchange, out, build_model)
    except (ValueError, TrainingStopped) as error:
        if not is_resumed:
            write_failure(out, error)
        raise
    folder = RunFolder(out)
    # The lock is taken before the state is read, so that no other server can write in between.
    with folder.lock(LOCK_SECONDS):
        FederatedRun.resume(exchange, folder, build_model).train_to_end()


def list_differences(agreement: FederationAgreement, given: FederationAgreement) -> list[str]:
    """What a run configuration says otherwise than the run that it resumes; sites may join and leave."""
    parts = [("recipe", ""), ("policy", ""), ("model", "model.")]
    differences = []
    for part, prefix in parts:
        began, now = to_plain(getattr(agreement, part)), to_plain(getattr(given, part))
        for name in sorted({*began, *now}):
            if began.get(name) != now.get(name):
                setting = f"{prefix}{name}".replace("_", "-")
                differences.append(f"{setting} is {_shorten(began.get(name))}, not {_shorten(now.get(name))}")
    return differences


def _shorten(value: Any) -> str:
    return str(value.get("name", value) if isinstance(value, Mapping) else value)[:40]


def check_run_config(config: Mapping[str, Any]) -> None:
    """Refuse settings that the server would refuse, before a run is started.

    The site table is on the server; where this is another machine, what depends on the sites is left to the server.
    """
    _read_absolute_path("out", config)
    if config.get("resume"):
        return
    table = Path(str(config["sites"]))
    if table.is_file():
        read_run_config({**config, "schema": ""}, read_sites(table))
    else:
        known = {name: value for name, value in config.items() if name not in ("schema", "group-deadlines")}
        read_run_config(known, (SiteEntry("a-site"),))


def read_run_config(config: Mapping[str, Any], sites: tuple[SiteEntry, ...]) -> FederationAgreement:
    """The agreement in a flat run configuration: fields of the server's policy, and options as on the command line.

    `options` holds further `name=value` pairs, for options that the app's pyproject.toml does not list.
    """
    if "method" not in config:
        raise ValueError(f"the run configuration holds {', '.join(config) or 'nothing'}; it must name the method, too")
    types = get_type_hints(ServerPolicy)
    policy, texts = {}, {}
    for key, value in config.items():
        field = key.replace("-", "_")
        if field in types:
            policy[field] = parse_value(types[field], str(value), key)
        elif key not in APP_KEYS:
            texts[key] = str(value)
    for pair in str(config.get("options", "")).split():
        key, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"options holds {pair!r}; it must be name=value pairs with spaces between them")
        texts[key] = text
    built = build_config(str(config["method"]), None, texts)
    for option in list_options():
        if option.name in texts and option.path[0] not in ("recipe", "model", "callbacks"):
            reason = "the sites prepare their data themselves, and the server measures the AUC"
            raise ValueError(f"{option.name} is {texts[option.name]!r}, but {reason}: leave it out")
    schema = str(config.get("schema", ""))
    return FederationAgreement(
        recipe=built.recipe,
        sites=sites,
        model=built.model,
        policy=ServerPolicy(**policy),
        callbacks=built.callbacks,
        schema=DataSchema.read_toml(_read_absolute_path("schema", config)) if schema else None,
    )


def _read_absolute_path(name: str, config: Mapping[str, Any]) -> Path:
    path = Path(str(config.get(name, "")))
    if not path.is_absolute():
        raise ValueError(f"{name} is {str(path)!r}; it must be an absolute path on the server: set it in --run-config")
    return path
