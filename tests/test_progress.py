"""Slow activities reach the display that is set, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedauc.progress import report_activity, show_activities


class RecordingDisplay:
    """Remembers which descriptions were shown and removed."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextmanager
    def show(self, description: str) -> Iterator[None]:
        self.events.append(f"show {description}")
        try:
            yield
        finally:
            self.events.append(f"remove {description}")


def test_a_display_sees_activities_that_start_while_it_is_set() -> None:
    display = RecordingDisplay()
    with report_activity("early"), show_activities(display.show), report_activity("compiling"):
        assert display.events == ["show compiling"]
    with report_activity("late"):
        pass
    assert display.events == ["show compiling", "remove compiling"]


def test_a_failed_activity_is_removed_and_the_outer_display_comes_back() -> None:
    outer, inner = RecordingDisplay(), RecordingDisplay()
    with show_activities(outer.show):
        with (
            pytest.raises(RuntimeError, match="no compiler"),
            show_activities(inner.show),
            report_activity("compiling"),
        ):
            raise RuntimeError("no compiler")
        with report_activity("capturing"):
            pass
    assert inner.events == ["show compiling", "remove compiling"]
    assert outer.events == ["show capturing", "remove capturing"]
