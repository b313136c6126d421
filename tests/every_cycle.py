"""Checkpoints at the end of every learning cycle, however long it took, for tests that need to know where they are.

`python -m every_cycle ARGUMENTS` is `fedauc ARGUMENTS` with such checkpoints.
"""

from __future__ import annotations

import pytest

from fedauc.cli import start
from fedauc.experiments.run_loop import RunLoop
from fedauc.training import Round


def is_cycle_over(loop: RunLoop, finished: Round) -> bool:
    """Whether a learning cycle ends here; the checkpoint before this round has been written by then."""
    assert loop.checkpointer is not None
    loop.checkpointer.wait()
    return loop.checkpointer.at_end if loop.is_over else finished.phase.ends_cycle and not finished.phase.scoring


@pytest.fixture
def every_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save every learning cycle in this process."""
    monkeypatch.setattr(RunLoop, "is_checkpoint_due", is_cycle_over)


if __name__ == "__main__":
    RunLoop.is_checkpoint_due = is_cycle_over  # type: ignore[assignment, method-assign]
    start()
