"""The command `fedauc tune`: search for good settings with Optuna."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from fedauc.cli.lazy_import import finish_imports
from fedauc.cli.training import ONE_METHOD, SHORT_NAMES, ConfigFile, OutFolder

if TYPE_CHECKING:
    from fedauc.experiments.tuning import Tuning


def tune(
    texts: dict[str, str],
    out: OutFolder,
    trials: Annotated[int, typer.Option("--trials", help="How many settings to try.", min=1)] = 50,
    search: Annotated[
        list[str] | None,
        typer.Option(
            "--search",
            metavar="option=low:high:log",
            help="An option of `fedauc run` to search, as low:high, low:high:log or a,b,...; may be repeated. Learning "
            "rate, local steps, weighting, the scale of the loss and the width of the model unless given.",
        ),
    ] = None,
    method: Annotated[str | None, typer.Option("--method", help=ONE_METHOD)] = None,
    config: ConfigFile = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Stop trials whose validation AUC is below the median of earlier ones.")
    ] = False,
) -> None:
    """Search for the settings with the highest validation AUC, one run after the other.

    The same command, or `fedauc resume DIR`, goes on after an interruption. Runs keep their best model (--keep best).

    Example: [bold]fedauc tune --trials 50 --data.validation-fraction 0.2 --search lr=0.001:1:log --out runs/tune[/bold]
    """
    from fedauc.experiments.config import Config
    from fedauc.experiments.options import build_config
    from fedauc.experiments.search_space import SearchSpace

    base = build_config(method, Config.read(config) if config else None, {"keep": "best", **texts})
    full_names = {flag.removeprefix("--"): name for name, flags in SHORT_NAMES.items() for flag in flags}
    space = SearchSpace.of(base, search or [], texts, full_names)
    finish_imports()

    from fedauc.experiments.tuning import Tuning

    train_tuning(lambda: Tuning.open_or_create(out, space, trials, prune))


def train_tuning(open_tuning: Callable[[], Tuning]) -> None:
    """Run the remaining trials of a tuning under progress bars, and print the best ones."""
    from fedauc.reports.progress import open_progress
    from fedauc.reports.trials import write_trials

    with open_progress() as bars:
        tuning = open_tuning()
        tuning.run_trials(bars.add_bar)
    write_trials(tuning)


COMMANDS: dict[str, Callable[..., None]] = {"tune": tune}
"""The commands of this module."""
