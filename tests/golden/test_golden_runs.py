"""Runs give the bits they gave before: the check that a refactoring changes no number."""

from __future__ import annotations

import pytest

from golden.golden_runs import differences


@pytest.mark.parametrize("name", ["loop", "batched", "distributed", "federation"])
def test_every_method_gives_the_recorded_bits(name: str) -> None:
    assert not list(differences(name))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
def test_compiled_runs_give_the_recorded_bits() -> None:
    assert not list(differences("compiled"))


@pytest.mark.gpu
def test_graphed_runs_give_the_recorded_bits() -> None:
    assert not list(differences("graphed"))
