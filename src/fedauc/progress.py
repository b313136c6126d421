"""Announce slow activities, such as compiling, to whoever shows progress (the command line's bar, a notebook).

>>> @contextmanager
... def print_activity(description: str) -> Iterator[None]:
...     print(description, "...")
...     yield
...     print("done")
>>> with show_activities(print_activity), report_activity("compiling the training step"):
...     pass
compiling the training step ...
done
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

Display = Callable[[str], AbstractContextManager[None]]
"""Shows a description for as long as the context that it returns is open."""

_display: ContextVar[Display | None] = ContextVar("display", default=None)


@contextmanager
def show_activities(display: Display) -> Iterator[None]:
    """Show every activity that is reported inside this context, in this thread."""
    token = _display.set(display)
    try:
        yield
    finally:
        _display.reset(token)


@contextmanager
def report_activity(description: str) -> Iterator[None]:
    """Tell the display, if there is one, what takes long; the description is a phrase such as "compiling the step"."""
    display = _display.get()
    with display(description) if display else nullcontext():
        yield
