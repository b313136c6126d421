"""Kill commands at random instants and inside file writes, fill the disk under them, resume, and compare the bits.

`python -m crash.crash_trials --kills 1000 --seed 5 --progress FILE` runs trials until so many kills and full disks have
happened. The seed and the number of a trial decide everything but the instants of kills by time. FILE keeps the number
of the last trial, so that the same command goes on after an interruption.

A trial forks this process, which has imported everything, so that it takes a fraction of a second.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from every_cycle import is_cycle_over
from fedauc.cli import start
from fedauc.experiments.run_loop import RunLoop
from fedauc.files import write_atomically
from federation.memory_grid import create_run, make_agreement, make_grid, resume_run
from small_federations import held_out

DATA = (
    *("--data", "synthetic", "--data.clients", "8", "--data.rows-per-client", "40", "--cycles", "4"),
    *("--local-steps", "2", "--engine", "loop"),
)

COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run", "--method", "cycp-pairwise", *DATA, "--stages", "geometric", "--stages.initial", "2"),
    "compare": ("compare", "--methods", "cycp-fedavg,a-scaffold", *DATA),
    "sweep": ("sweep", "--method", "cycp-minimax", "--vary", "lr=0.03,0.1", *DATA),
    "tune": ("tune", "--trials", "2", "--search", "lr=0.01:0.1:log", *DATA),
}
"""What is killed, besides the federation."""

KINDS = (*COMMANDS, "federation")

MAX_STARTS = 12
"""A trial is killed in at most this many of its starts; the next one runs to the end."""

SECONDS_PER_START = 120.0


class Blow(NamedTuple):
    """What hits a process: a kill after so many seconds, or something at the n-th file operation of its kind."""

    kind: str
    moment: float = 0.0
    operation: int = 0
    torn_bytes: int = 0


BLOW_KINDS = ("time", "before fsync", "torn write", "after fsync", "before rename", "after rename", "full disk")


def draw_blow(generator: random.Random, operations: int) -> Blow:
    """A random blow; `operations` is how many file operations an uninterrupted command has."""
    kind = generator.choice(BLOW_KINDS)
    moment = generator.uniform(0.0, 0.5)
    return Blow(kind, moment, generator.randrange(max(1, operations)), generator.randrange(1, 64))


class FaultyDisk:
    """Stands in for the calls by which files reach the disk, counts them, and strikes at the one that is meant."""

    def __init__(self, blow: Blow | None) -> None:
        self.blow, self.operations = blow, 0
        self._fsync, self._rename, self._replace = os.fsync, Path.rename, Path.replace

    def install(self) -> None:
        """Take the place of `os.fsync`, `Path.rename` and `Path.replace` in this process."""
        disk = self
        os.fsync = self._sync_file  # type: ignore[assignment]

        def rename(path: Path, target: Path) -> Path:
            return disk._move_file(disk._rename, path, target)

        def replace(path: Path, target: Path) -> Path:
            return disk._move_file(disk._replace, path, target)

        Path.rename, Path.replace = rename, replace  # type: ignore[method-assign, assignment]

    def _is_hit(self, *kinds: str) -> bool:
        return self.blow is not None and self.blow.kind in kinds and self.operations > self.blow.operation

    def _sync_file(self, descriptor: Any) -> None:
        self.operations += 1
        if self._is_hit("torn write", "full disk"):
            assert self.blow is not None
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            os.ftruncate(number, max(0, os.fstat(number).st_size - self.blow.torn_bytes))
            if self.blow.kind == "full disk":
                # The disk stays full: every later write fails as well.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            kill_self()
        if self._is_hit("before fsync"):
            kill_self()
        self._fsync(descriptor)
        if self._is_hit("after fsync"):
            kill_self()

    def _move_file(self, move: Callable[[Path, Path], Path], path: Path, target: Path) -> Path:
        self.operations += 1
        if self._is_hit("before rename"):
            kill_self()
        moved = move(path, target)
        if self._is_hit("after rename"):
            kill_self()
        return moved


def kill_self() -> None:
    """Die at once, as by `kill -9`."""
    os.kill(os.getpid(), signal.SIGKILL)


def perform_command(kind: str, out: Path) -> None:
    """Begin the command, or go on with it if its folder is there."""
    if kind == "federation":
        grid = make_grid(out.with_name(f"{out.name}-sites"), test=held_out())
        agreement = make_agreement("scaffold", participation="cyclic")
        run = (resume_run if out.exists() else create_run)(agreement, grid, out)
        run.train_to_end()
        return
    sys.argv = ["fedauc", *(("resume", str(out)) if out.exists() else (*COMMANDS[kind], "--out", str(out)))]
    start()


def start_child(kind: str, out: Path, blow: Blow | None, log: Path) -> tuple[int, bool]:
    """Run the command in a forked process under a blow; its status, and the operations that it has counted in `log`."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            with log.open("wb") as stream:
                os.dup2(stream.fileno(), 1)
                os.dup2(stream.fileno(), 2)
            disk = FaultyDisk(blow)
            disk.install()
            RunLoop.is_checkpoint_due = is_cycle_over  # type: ignore[assignment, method-assign]
            try:
                perform_command(kind, out)
                code = 0
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            except OSError as error:
                # The federation has no command line around it here, which would say so in one line.
                traceback.print_exc()
                code = 2 if kind == "federation" and error.errno == errno.ENOSPC else 1
            if blow is None:
                log.with_suffix(".count").write_text(str(disk.operations))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return _wait_for_child(child, blow)


def _wait_for_child(child: int, blow: Blow | None) -> tuple[int, bool]:
    """The exit code of a child, -9 if it was killed, and whether the blow has hit it."""
    begin = time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return code, code == -signal.SIGKILL
        seconds = time.monotonic() - begin
        if blow is not None and blow.kind == "time" and seconds >= blow.moment:
            os.kill(child, signal.SIGKILL)
        elif seconds > SECONDS_PER_START:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"a command did not end within {SECONDS_PER_START:g} s after {blow}")
        time.sleep(0.002)


def read_outcome(out: Path) -> dict[str, bytes]:
    """The files of a folder that must not depend on interruptions, by their paths."""
    names = ("records.jsonl", "attendance.jsonl", "result.json", "model.pt", "model.npz", "scores.npz", "scorer.json")
    return {str(path.relative_to(out)): path.read_bytes() for name in names for path in sorted(out.rglob(name))}


class CrashTrials:
    """Trials against uninterrupted commands, which are run once each."""

    def __init__(self, home: Path, seed: int) -> None:
        self.home, self.seed = home, seed
        self._expected: dict[str, tuple[dict[str, bytes], int]] = {}

    def expected(self, kind: str) -> tuple[dict[str, bytes], int]:
        """What the uninterrupted command writes, and how many file operations it has."""
        if kind not in self._expected:
            out, log = self.home / f"{kind}-uninterrupted", self.home / f"{kind}.log"
            code, _ = start_child(kind, out, None, log)
            assert code == 0, log.read_text()
            outcome = read_outcome(out)
            assert outcome
            self._expected[kind] = outcome, int(log.with_suffix(".count").read_text())
        return self._expected[kind]

    def run_trial(self, number: int) -> dict[str, int]:
        """One command, struck again and again until it gets through; how often each kind of blow has hit it."""
        generator = random.Random(f"{self.seed}-{number}")
        kind = KINDS[number % len(KINDS)]
        expected, operations = self.expected(kind)
        out, log, hits = self.home / f"{kind}-{number}", self.home / "trial.log", dict[str, int]()
        where, blows = f"seed {self.seed}, trial {number} ({kind})", list[Blow]()
        for attempt in range(MAX_STARTS + 1):
            blow = draw_blow(generator, operations) if attempt < MAX_STARTS else None
            code, killed = start_child(kind, out, blow, log)
            blows += [blow] if blow else []
            if code == 0:
                break
            text = log.read_text(errors="replace")
            if not killed:
                assert blow is not None, f"{where}: the last start failed after {blows}: {text}"
                assert (blow.kind, code) == ("full disk", 2), f"{where}: code {code} after {blows}: {text}"
                assert kind == "federation" or "Traceback" not in text, f"{where}: {blows}: {text}"
            assert blow is not None
            hits[blow.kind] = hits.get(blow.kind, 0) + 1
        outcome = read_outcome(out)
        different = sorted(name for name in {*outcome, *expected} if outcome.get(name) != expected.get(name))
        assert not different, f"{where}: {different} differ from the uninterrupted {kind} after {blows}"
        left = [str(path.relative_to(out)) for path in out.rglob(".*")]
        assert not left, f"{where}: {left} are left behind after {blows}"
        shutil.rmtree(out)
        shutil.rmtree(out.with_name(f"{out.name}-sites"), ignore_errors=True)
        return hits


def main() -> None:
    """Run trials until enough blows have hit, and print how many of which kind."""
    parser = argparse.ArgumentParser(description="Kill commands, resume them, and compare the bits.")
    parser.add_argument("--kills", type=int, default=1000, help="Kills and full disks in all.")
    parser.add_argument("--seed", type=int, default=None, help="Decides the trials; drawn and printed unless given.")
    parser.add_argument("--progress", type=Path, default=None, help="A file that keeps the state of the trials.")
    options = parser.parse_args()
    state: dict[str, Any] = {"seed": options.seed, "trials": 0, "hits": {}}
    if options.progress is not None and options.progress.is_file():
        state = json.loads(options.progress.read_text())
        if options.seed not in (None, state["seed"]):
            raise SystemExit(f"{options.progress} belongs to seed {state['seed']}; delete it to begin another")
    if state["seed"] is None:
        state["seed"] = random.SystemRandom().randrange(2**31)
    print(f"seed {state['seed']}, {sum(state['hits'].values())} of {options.kills} kills done before", flush=True)
    with tempfile.TemporaryDirectory(prefix="fedauc-crash-") as home:
        trials = CrashTrials(Path(home), state["seed"])
        while sum(state["hits"].values()) < options.kills:
            for kind, count in trials.run_trial(state["trials"]).items():
                state["hits"][kind] = state["hits"].get(kind, 0) + count
            state["trials"] += 1
            if options.progress is not None:
                write_atomically(options.progress, json.dumps(state).encode())
            if state["trials"] % 25 == 0:
                print(f"{sum(state['hits'].values())} kills in {state['trials']} trials", flush=True)
    print(f"all {state['trials']} commands gave the uninterrupted bits: {state['hits']}")


if __name__ == "__main__":
    main()
