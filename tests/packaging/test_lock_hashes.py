"""The file of hashes pins what the constraints pin."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("lock_hashes", ROOT / "packaging" / "lock_hashes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_pin_but_those_with_own_builds_has_a_hash() -> None:
    script = load_script()
    lines = script.read_pins(ROOT / "requirements-hashed.txt")
    assert all(re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    hashed = {line.split()[0] for line in lines}
    pins = script.read_pins(ROOT / "constraints.txt")
    assert hashed == {pin for pin in pins if pin.split("==")[0] not in script.OWN_BUILDS}, "run `make lock`"
