"""The suite of a wrapper: around an algorithm of each family, it keeps the promises of an algorithm."""

from __future__ import annotations

from fedauc.algorithms import find_methods
from fedauc.interfaces import Wrapper
from fedauc.testing._client_visits import start_model
from fedauc.testing._expectations import check_configuration, expect
from fedauc.testing._runs import check_determinism, check_resume, check_rounds
from fedauc.testing.algorithm import (
    check_arguments_unchanged,
    check_client_methods,
    check_server_settings,
    check_tracing,
)
from fedauc.testing.small_federation import small_recipe
from fedauc.wrappers import wrap_algorithm

METHODS = ("cycp-fedavg", "a-scaffold", "cycp-minimax", "cycp-pairwise")
"""A method of each family: plain, with control variates, with dual variables, with pools."""


def check_wrapper(wrapper: Wrapper) -> None:
    """Check a wrapper around four algorithms: client methods by hand, then runs on the loop and the batched engine.

    A wrapper may refuse some of them (`check_algorithm`), with an error of one line, but not all.
    """
    check_configuration(wrapper, Wrapper)
    refusals = 0
    for name in METHODS:
        method = find_methods()[name]
        algorithm = method.algorithm(**dict(method.parameters))
        lengths = {"body.weight": len(start_model(algorithm).weights) - 1, "head.weight": 1}
        try:
            wrapped = wrap_algorithm(algorithm, (wrapper,), lengths)
        except ValueError as refusal:
            expect("\n" not in str(refusal), f"the refusal of {name} must be one line, not {str(refusal)!r}")
            refusals += 1
            continue
        check_client_methods(wrapped)
        check_arguments_unchanged(wrapped)
        check_server_settings(wrapped)
        for stacked in (False, True):
            check_tracing(wrapped, stacked)
        for engine in ("loop", "batched"):
            recipe = small_recipe(name, engine=engine, wrappers=(wrapper,))
            check_rounds(recipe)
            check_determinism(recipe)
            check_resume(recipe)
    expect(refusals < len(METHODS), f"the wrapper refuses every one of {', '.join(METHODS)}; it must take one of them")
