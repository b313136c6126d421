"""Records leave out the fields at their defaults: those defaults must stay what they were."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedauc.experiments.config import to_plain
from paper.records import RECORDED_DEFAULTS, changed_fields, read_changes, read_json_lines
from paper.scales import SCALES

RECORDS = Path(__file__).parents[2] / "paper" / "records"

DEFAULTS = Path(__file__).with_name("record_defaults.json")
"""One configuration of each kind in the records: the changed fields of its line, and all its fields."""


def kind_of(config: Any) -> tuple[str, ...]:
    """The method and the names of all components, which decide what the defaults are."""
    if not isinstance(config, dict):
        return ()
    names = [str(config[key]) for key in ("method", "name") if key in config]
    return (*names, *(name for key in sorted(config) for name in kind_of(config[key])))


def stored_configs() -> Iterator[dict[str, Any]]:
    for path in sorted(RECORDS.glob("*.jsonl")):
        if "choices" not in path.name:
            yield from read_json_lines(path, lambda content: content["config"])


def read_config(changes: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(read_changes(changes))
    return plain


def assert_contains(new: Any, old: Any, path: str) -> None:
    """Every field of `old` is in `new` with the same value; `new` may have more fields."""
    if not isinstance(old, dict):
        assert new == old, f"{path} was {old!r} and is {new!r}: records that leave it out would change their meaning"
        return
    for key, value in old.items():
        assert key in new, f"{path}.{key} is gone: rename it in paper/records and in {DEFAULTS.name} too"
        assert_contains(new[key], value, f"{path}.{key}")


@pytest.mark.parametrize("example", json.loads(DEFAULTS.read_text()), ids=lambda example: "-".join(kind_of(example[0])))
def test_the_defaults_behind_the_records_have_not_changed(example: tuple[dict[str, Any], dict[str, Any]]) -> None:
    changes, whole = example
    assert_contains(read_config(changes), whole, "config")


def test_every_kind_of_record_has_an_example() -> None:
    known = {kind_of(changes) for changes, _ in json.loads(DEFAULTS.read_text())}
    assert {kind_of(config) for config in stored_configs()} <= known


def test_every_record_is_found_by_the_configuration_that_it_describes() -> None:
    for changes in stored_configs():
        assert changed_fields(read_changes(changes)) == json.dumps(changes, sort_keys=True)


@pytest.mark.parametrize("scale", SCALES)
def test_the_scales_say_what_their_weighting_is(scale: str) -> None:
    assert SCALES[scale].common["weighting"] == RECORDED_DEFAULTS["weighting"] == "clients"
