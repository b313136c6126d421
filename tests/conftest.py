"""Tests that need a GPU are skipped aloud unless asked for: the summary says how to run them."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from fedauc import plugins

REASONS = {
    "gpu": "needs a CUDA device; run it with `make test-gpu`",
    "slow": "takes long: it compiles much or starts many processes; run it with `make test-slow`",
    "browser": "opens pages in headless Chromium; run it with `make test-browser`",
    "packaging": "builds and installs the distributions, which takes minutes; run it with `make test-packaging`",
    "trackers": "needs tracking tools in an environment of their own; run it with `make test-trackers`",
    "deploy": "lints and starts files in an environment of its own; run it with `make test-deploy`",
    "flower": "needs Flower in an environment of its own; run it with `make test-federation`",
    "nvflare": "needs NVFlare in an environment of its own; run it with `make test-nvflare`",
}


@pytest.fixture(autouse=True, scope="session")
def handle_interrupts() -> None:
    """SIGINT has its usual effect; a shell that starts tests in the background makes them ignore it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def forget_registrations() -> Iterator[None]:
    """What a test registers is unknown to the next one."""
    with plugins.restore_registrations():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--only gpu` runs just those."""
    parser.addoption("--only", choices=list(REASONS), help="run only the tests with this mark")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the marked tests, or everything but them."""
    only = config.getoption("--only")
    if only:
        items[:] = [item for item in items if item.get_closest_marker(only)]
        return
    for item in items:
        for mark, reason in REASONS.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))
