"""`python -m federation_simulation --seeds A:B` runs the seeds from A to B - 1; its exit code is 1 if one fails."""

from __future__ import annotations

import argparse
import datetime
import sys
import time

from federation_simulation.trials import run_seeds

FIRST_DAY = datetime.date(2026, 1, 1)


def choose_seeds(options: argparse.Namespace) -> range:
    """The seeds that the options name; with `--from-date`, as many as a day has, and others every day."""
    if options.seed is not None:
        return range(options.seed, options.seed + 1)
    if options.from_date:
        day = datetime.datetime.now(datetime.UTC).date() if options.from_date == "today" else options.from_date
        number = (datetime.date.fromisoformat(str(day)) - FIRST_DAY).days
        return range(number * options.per_day, (number + 1) * options.per_day)
    first, _, end = options.seeds.partition(":")
    return range(int(first), int(end))


def main() -> None:
    """Run seeds and print the failures."""
    parser = argparse.ArgumentParser(description="Simulate federations under faults.")
    parser.add_argument("--seeds", default="0:200", metavar="A:B", help="The seeds from A to B - 1.")
    parser.add_argument("--seed", type=int, default=None, help="One seed, as a failure names it.")
    parser.add_argument("--from-date", metavar="DATE", default="", help="The seeds of a day: 2026-03-02, or today.")
    parser.add_argument("--per-day", type=int, default=2000, help="How many seeds a day has.")
    parser.add_argument("--most-failures", type=int, default=5, help="Stop after so many failing seeds.")
    parser.add_argument("--no-shrinking", action="store_true", help="Print failures with all their faults.")
    options = parser.parse_args()
    seeds, begin, failed, done = choose_seeds(options), time.perf_counter(), list[int](), 0
    print(f"seeds {seeds.start} to {seeds.stop - 1}", flush=True)
    for first in range(seeds.start, seeds.stop, 100):
        part = range(first, min(first + 100, seeds.stop))
        failed += run_seeds(part, lambda text: print(text, flush=True), not options.no_shrinking)
        done += len(part)
        print(f"{done} seeds in {time.perf_counter() - begin:.0f} s, {len(failed)} failed", flush=True)
        if len(failed) >= options.most_failures:
            break
    if failed:
        sys.exit(f"these seeds fail: {failed}")


if __name__ == "__main__":
    main()
