"""What all fuzz tests share: how many examples, hostile values, damaged bytes, and a limit on memory.

`make test` runs a bounded number of examples that are the same every time. `make fuzz` multiplies them and draws from a
seed, which it prints: FUZZ_SEED and FUZZ_FACTOR are the environment variables.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from fedauc.cli import start

Test = TypeVar("Test", bound=Callable[..., None])

SEED = os.environ.get("FUZZ_SEED", "")
"""Empty in `make test`, where examples do not depend on any seed."""

FACTOR = int(os.environ.get("FUZZ_FACTOR", "1"))
"""How many times more examples than in `make test`."""

MEMORY_ALLOWED = 3 * 2**30
"""Bytes of address space that an example may ask for on top of what the process has."""


def fuzz(examples: int) -> Callable[[Test], Test]:
    """Run a test with so many examples, times `FACTOR`; failing ones are made smaller, and nothing is stored."""

    def decorate(test: Test) -> Test:
        checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
        decorated = settings(
            max_examples=examples * FACTOR,
            derandomize=not SEED,
            database=None,
            deadline=None,
            suppress_health_check=checks,
            print_blob=True,
            phases=(Phase.explicit, Phase.generate, Phase.shrink),
        )(test)
        return hypothesis.seed(int(SEED))(decorated) if SEED else decorated

    return decorate


HUGE_NUMBERS = (0, -1, 1, 2, 3, 2**31, 2**63, -(2**63), 10**30, 10**400)

HOSTILE_FLOATS = (0.0, -0.0, 0.5, -1.0, 1e-300, 1e30, 1e300, float("nan"), float("inf"), -float("inf"))

HOSTILE_TEXTS = ("", " ", "none", "name", "\0", "a\nb", "é", "../..", "cuda", "-1", "9" * 400, "x" * 5000, "\ud800")

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(HUGE_NUMBERS),
    st.integers(),
    st.sampled_from(HOSTILE_FLOATS),
    st.floats(),
    st.sampled_from(HOSTILE_TEXTS),
    st.text(max_size=20),
)

JSON_VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
"""Anything that JSON can hold."""


def list_paths(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON document, of objects and lists as well."""
    children: list[tuple[Any, Any]] = []
    if isinstance(document, dict):
        children = list(document.items())
    elif isinstance(document, list):
        children = list(enumerate(document))
    return [path, *(inner for key, child in children for inner in list_paths(child, (*path, key)))]


@st.composite
def damaged_documents(draw: st.DrawFn, document: Any) -> Any:
    """A JSON document in which one to three values are replaced, removed or joined by others."""
    changed = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list_paths(changed)))
        if not path:
            return draw(JSON_VALUES)
        owner = changed
        for key in path[:-1]:
            owner = owner[key]
        action = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if action == "remove":
            del owner[path[-1]]
        elif action == "add" and isinstance(owner, dict):
            owner[draw(st.text(max_size=8))] = draw(JSON_VALUES)
        else:
            owner[path[-1]] = draw(JSON_VALUES)
    return changed


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with one to four changes: bits flipped, a part cut out, repeated, overwritten, or the end cut off."""
    damaged = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(damaged) - 1)))
        length = draw(st.sampled_from([1, 1, 2, 8, 64, 1024]))
        match draw(st.sampled_from(["flip", "flip", "cut", "repeat", "overwrite", "insert", "end"])):
            case "flip" if damaged:
                damaged[place] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del damaged[place : place + length]
            case "repeat":
                damaged[place:place] = damaged[place : place + length]
            case "overwrite":
                damaged[place : place + length] = (
                    draw(st.sampled_from([b"\0", b"\xff", b"9", b"-", b"{", b'"'])) * length
                )
            case "insert":
                damaged[place:place] = draw(st.binary(max_size=16))
            case "end":
                del damaged[place:]
    return bytes(damaged)


@contextlib.contextmanager
def limited_memory(allowed: int = MEMORY_ALLOWED) -> Iterator[None]:
    """Let the process have so many bytes more of address space; asking for more is an error."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + allowed
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Outcome(NamedTuple):
    """How a command ended, and what it wrote on standard error."""

    code: int
    err: str


def run_command(*words: str) -> Outcome:
    """Run a `fedauc` command in this process under the limit of memory; any exception but an exit is the caller's."""
    before, out, err = sys.argv, io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    sys.argv = ["fedauc", *words]
    try:
        with limited_memory(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            start()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = before
    return Outcome(code, err.getvalue())


def check_outcome(outcome: Outcome) -> None:
    """A command ends well, with one line and code 2, or because training had to stop, with code 3."""
    assert outcome.code in (0, 2, 3), outcome
    assert "Traceback" not in outcome.err, outcome.err
    if outcome.code == 2:
        lines = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, outcome.err
        assert outcome.err.splitlines()[-1] == lines[0], outcome.err


torch.set_num_threads(1)
