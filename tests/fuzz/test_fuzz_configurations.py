"""Any configuration file and any options end in a configuration or in one line."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fedauc.data.datasets.synthetic import Synthetic
from fedauc.experiments.config import Config
from fedauc.experiments.options import build_config, list_options
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.runner import DataCache, assemble_run
from fuzz.fuzzing import (
    HOSTILE_FLOATS,
    HOSTILE_TEXTS,
    HUGE_NUMBERS,
    damaged_bytes,
    damaged_documents,
    fuzz,
    limited_memory,
)

METHODS = ("cycp-pairwise", "cycp-minimax", "scaffold", "cycp-fedavg")

DOCUMENTS = [
    Config(recipe=Recipe.of(method, cycles=2), data=Synthetic(clients=4, rows_per_client=20)).to_document()
    for method in METHODS
]

CACHE = DataCache()

OPTIONS = {option.name: option for option in list_options()}


def assemble_or_refuse(config: Config) -> None:
    """Build everything that a run needs before its first round; what does not fit must be a ValueError."""
    try:
        with limited_memory():
            assemble_run(config, CACHE)
    except (ValueError, FileNotFoundError):
        return


@fuzz(150)
@given(st.sampled_from(DOCUMENTS).flatmap(damaged_documents))
def test_a_damaged_configuration_is_read_or_refused(document: Any) -> None:
    try:
        config = Config.from_json(json.dumps(document))
    except ValueError:
        return
    assert Config.from_json(config.to_json()) == config or "nan" in config.to_json().lower()
    assemble_or_refuse(config)


@fuzz(100)
@given(st.sampled_from([json.dumps(document, indent=2).encode() for document in DOCUMENTS]).flatmap(damaged_bytes))
def test_damaged_text_is_read_or_refused(content: bytes) -> None:
    try:
        Config.from_json(content.decode("utf-8", "replace"))
    except ValueError:
        return


@st.composite
def option_texts(draw: st.DrawFn) -> dict[str, str]:
    """One to four options with values that a user could type, mistyped or not."""
    numbers = st.sampled_from([*map(str, HUGE_NUMBERS[:-1]), *map(str, HOSTILE_FLOATS), "1,2", "0.5,0.25", "1e18"])
    texts = {}
    for _ in range(draw(st.integers(1, 4))):
        option = OPTIONS[draw(st.sampled_from(sorted(OPTIONS)))]
        choices = st.sampled_from(option.choices) if option.choices else numbers
        texts[option.name] = draw(choices | numbers | st.sampled_from(HOSTILE_TEXTS) | st.text(max_size=8))
        family = option.name.split(".")[0]
        if "." in option.name and family in OPTIONS and family not in texts and OPTIONS[family].choices:
            texts[family] = draw(st.sampled_from(OPTIONS[family].choices))
    return texts


@fuzz(200)
@given(st.sampled_from(METHODS), option_texts())
def test_any_options_are_built_or_refused(method: str, texts: dict[str, str]) -> None:
    start = {"data": "synthetic", "data.clients": "4", "data.rows-per-client": "20", "cycles": "2"}
    if texts.get("data", "synthetic") != "synthetic":
        start = {"cycles": "2"}
    try:
        config = build_config(method, None, {**start, **texts})
    except ValueError:
        return
    assemble_or_refuse(config)
