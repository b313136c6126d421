"""What an audit has shown, in plain sentences."""

from __future__ import annotations

import math

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedauc.experiments.auditing import CanaryAudit, RunAudit
from fedauc.experiments.pool_audit import ClassAttack, PoolAudit
from fedauc.metrics.delong import Interval
from fedauc.privacy.audit import ALARM_LEVEL

ALARMS = 2 * ALARM_LEVEL
"""The probability that a correct run is called violated: two parts of the audit may err."""


def print_audit(audit: RunAudit) -> None:
    """Print an audit, one fact a line, folded to the width of the terminal."""
    table = Table.grid(padding=(0, 2))
    for name, value in describe_audit(audit).items():
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    Console().print(table, highlight=False)


def describe_audit(audit: RunAudit) -> dict[str, str]:
    """The facts of an audit by name: what is proven, what was measured, the verdict, and what the pools leak."""
    if audit.canaries is None:
        facts = {"proven": "no epsilon: the run adds no noise, so that nothing is promised to its clients"}
    else:
        facts = _describe_canaries(audit.canaries)
    if audit.pools is not None:
        facts |= _describe_pools(audit.pools)
    return facts


def _describe_canaries(audit: CanaryAudit) -> dict[str, str]:
    """What is proven, what the canaries show, and what they cannot show."""
    declared, result = audit.declared, audit.result
    runs = "1 repetition" if audit.repeats == 1 else f"{audit.repeats} repetitions"
    facts = {
        "proven": f"epsilon {declared.proven_epsilon:.2f} (delta {declared.delta:g}) for all that the run releases, "
        f"{declared.proven_model_epsilon:.2f} for its models alone, which are audited here",
        "audited": f"at least {result.epsilon_low:.2f} with 95 % confidence, estimate {result.epsilon:.2f}; at least "
        f"{result.epsilon_clopper_pearson:.2f} without any assumption about distributions",
    }
    if result.verdict == "violated":
        facts["verdict"] = f"VIOLATED: {'; '.join(result.reasons)}"
    else:
        sign = "No clear sign" if result.epsilon_low > result.proven_epsilon else "No sign"
        facts["verdict"] = (
            f"{sign} of a privacy bug. The estimate is consistent with the proof; a correct run is called violated "
            f"with probability {ALARMS:g}"
        )
        if declared.sampling == 1:
            facts["verdict"] += (
                ". Canaries are the clients that the proof fears most, so that the estimate lies near the proven "
                "number, and above it in up to half of all audits"
            )
        if result.epsilon_low > result.proven_epsilon:
            facts["verdict"] += (
                ". Here the 95 % limit is above the proven number, which happens to about one correct run in twenty: "
                "more --repeats make it sharper"
            )
    if declared.sampling < 1:
        facts["draws"] = (
            f"who knows which clients were drawn recognises canaries with mu {result.mu:.2f} (proven at most "
            f"{result.proven_mu:.2f}); the epsilon above is for those who do not, and this attack is not their best"
        )
    facts["canaries"] = (
        f"{runs} of the training with {audit.canaries} canaries each, whose directions are drawn in the "
        f"{audit.dimension:,} dimensions of the model; {result.canaries_in} took part, {result.canaries_out} did not"
    )
    facts["noise"] = (
        f"{result.noise.deviation:.3f} of the declared deviation; largest correlation over rounds "
        f"{result.noise.largest_autocorrelation:.3f}. The noise of histograms and class counts is not audited"
    )
    return facts


def _describe_pools(audit: PoolAudit) -> dict[str, str]:
    """How well rows are recognised in each pool, and what to make of it."""
    noised = "noised " if audit.is_noised else ""
    facts = {
        f"{attack.label}s": _describe_attack(attack, f"the {noised}histogram pool ({audit.bins} bins)")
        for attack in audit.classes
    }
    if not facts:
        return {"pools": "no attack: it needs at least 2 rows of a class in the last pool and 2 test rows"}
    leaks = max(attack.raw_auc.low for attack in audit.classes) > 0.5
    advice = "0.5 is chance. "
    if audit.shared == "histogram":
        advice += "The run shares the histogram; the raw pool is what --algorithm.pool cycle would have shared"
    elif leaks:
        advice += "The run shares the raw pool, which leaks: --algorithm.pool histogram shares the histogram instead"
    else:
        advice += "The run shares the raw pool, in which this attack finds nothing"
    return facts | {"pools": advice}


def _describe_attack(attack: ClassAttack, histogram: str) -> str:
    return (
        f"a client's {attack.label} rows are recognised in the raw score pool with AUC {_format(attack.raw_auc)}, in "
        f"{histogram} with AUC {_format(attack.histogram_auc)} ({attack.members:,} rows in the pool, {attack.others:,} "
        "test rows)"
    )


def _format(interval: Interval) -> str:
    numbers = (interval.estimate, interval.low, interval.high)
    estimate, low, high = ("-" if math.isnan(number) else f"{number:.3f}" for number in numbers)
    return f"{estimate} [{low}, {high}]"
