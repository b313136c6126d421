"""The settings of a Flower app with fedauc: those in its pyproject.toml, and what `--run-config` changes for a run."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedauc.federation.agreement import ServerPolicy
from fedauc.federation.app_folder import fill_template
from fedauc.federation.toml_files import read_toml_file


def read_app_config(folder: Path) -> dict[str, Any]:
    """The settings in the pyproject.toml of an app's folder."""
    path = folder / "pyproject.toml"
    if not path.is_file():
        raise ValueError(f"{folder} is no app: it has no pyproject.toml; give the folder that `init` made")
    config = _find_config(read_toml_file(path, "pyproject.toml", "give the folder that `init` made"))
    if not {"method", "sites"} <= config.keys():
        raise ValueError(f"{path} has no method and sites in [tool.flwr.app.config]; give the folder that `init` made")
    return config


def read_template_config(folder: Path) -> dict[str, Any]:
    """The settings that `init` writes into a new app in that folder."""
    return _find_config(tomllib.loads(fill_template("pyproject.toml.template", folder)))


def read_settings(run_config: str) -> dict[str, Any]:
    """The settings in a text of name=value pairs, or in a TOML file that it names, as Flower reads them."""
    if run_config.endswith(".toml") and "=" not in run_config:
        return read_toml_file(Path(run_config).expanduser(), run_config, "give a TOML file, or name=value pairs")
    try:
        return tomllib.loads("\n".join(_split_settings(run_config)))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"run-config is {run_config!r}; write name=value pairs as for flwr ({error})") from error


def merge_settings(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The app's settings with those of a run; Flower lets a run change only what the app has, and does not say what."""
    for name, value in settings.items():
        if name in config:
            continue
        problem = f"run-config sets {name!r}, which the app's pyproject.toml does not have"
        similar = difflib.get_close_matches(name.lower().replace("_", "-"), config, n=1, cutoff=0.75)
        if similar:
            raise ValueError(f"{problem}; did you mean {similar[0]!r}?")
        if name.replace("-", "_") in {field.name for field in dataclasses.fields(ServerPolicy)}:
            raise ValueError(f"{problem}; add it there to [tool.flwr.app.config]")
        raise ValueError(f'{problem}; an option of `fedauc run` belongs into options="{name}={value} ..."')
    return {**config, **settings}


def _find_config(document: Any) -> dict[str, Any]:
    """The table of settings in a pyproject.toml; empty if there is none."""
    for key in ("tool", "flwr", "app", "config"):
        document = document.get(key) if isinstance(document, dict) else None
    return dict(document) if isinstance(document, dict) else {}


def _split_settings(text: str) -> list[str]:
    """The pairs of a run configuration, `a=1 b="two words"`, as lines of TOML."""
    pairs, quote, current = [], "", ""
    for letter in text:
        if letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        if letter == " " and not quote:
            pairs.append(current)
            current = ""
        else:
            current += letter
    return [pair for pair in (*pairs, current) if pair]
