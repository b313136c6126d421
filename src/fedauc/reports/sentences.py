"""What a report says in words: the answer, and what left the clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fedauc.algorithms.compositional import CompositionalPairwise
from fedauc.experiments.guarantee import describe_spending, summarize_guarantee
from fedauc.experiments.private_training import has_client_noise
from fedauc.metrics import delong_test
from fedauc.reports.caveats import has_caveat
from fedauc.reports.report_runs import ReportRun
from fedauc.reports.report_tables import Cell, ReportTable, format_p_value
from fedauc.reports.summary import Spread
from fedauc.reports.tables import format_bytes
from fedauc.transforms.secure_sum import SecureSum

SIGNIFICANCE = 0.05


def client_noun(run: ReportRun) -> str:
    """What the participants are called: a federation has sites, a simulation clients."""
    return "site" if run.is_federation else "client"


def answer_run(run: ReportRun) -> str:
    """The answer of one run in a sentence."""
    final, metric = run.final, run.metrics[0]
    if final is not None and run.privacy is not None and final.get(metric.columns[0]) is None:
        return f"{_describe_training(run)}, the AUC is not known: the noise of the private evaluation hides it."
    if final is None or final.get(metric.columns[0]) is None:
        return f"{run.name} has not been evaluated yet: {run.status}."
    value = final[metric.columns[0]]
    trained = _describe_training(run)
    if run.is_embedding:
        return f"{trained}, the model's embeddings have a verification AUC of {value:.3f} on pairs of test rows."
    if metric.text != "auc":
        return f"{trained}, the model has a test {metric.label} of {value:.3f}."
    if run.is_federation:
        bounds = (
            ""
            if final["auc_low"] == final["auc_high"]
            else f", known to lie between {final['auc_low']:.4f} and {final['auc_high']:.4f}"
        )
        rows = f"{final['test_positives']:,} positive and {final['test_negatives']:,} negative held-out rows"
        over = f"over {rows} of {final['test_sites']} sites"
        wins = f"the model ranks a positive row above a negative one {_share(value)} of the time"
        return f"{trained}, {wins} (AUC {value:.3f}{bounds}, {over})."
    interval = "" if final.get("low") is None else f", 95 % interval {final['low']:.3f} to {final['high']:.3f}"
    rows = ""
    if run.scored is not None:
        positives = int((run.scored.labels == 1).sum())
        rows = f"; {len(run.scored.labels):,} test rows, {positives:,} of them positive"
    so_far = "" if run.done else " so far"
    return (
        f"{trained}, the model{so_far} ranks a random positive case above a random negative one {_share(value)} of the "
        f"time (AUC {value:.3f}{interval}{rows})."
    )


class SettingSeeds(NamedTuple):
    """A setting over its evaluated seeds: what it is judged by, and the final test values."""

    name: str
    judged: float
    on_validation: bool
    values: list[float]

    @property
    def spread(self) -> Spread:
        """Mean and standard deviation of the test values."""
        return Spread.of(self.values)


def summarize_settings(runs: Sequence[ReportRun]) -> list[SettingSeeds]:
    """Settings in the order of their mean validation value, or test value where a run has no validation rows."""
    column = runs[0].metrics[0].columns[0]
    finals: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if run.final is not None and run.final.get(column) is not None:
            # Noise can hide the value of a private evaluation on the validation rows.
            finals.setdefault(run.setting or run.name, []).append(run.final)
    by = f"validation_{column}"
    on_validation = all(final.get(by) is not None for records in finals.values() for final in records)
    summaries = []
    for name, records in finals.items():
        judged = sum(final[by if on_validation else column] for final in records) / len(records)
        summaries.append(SettingSeeds(name, judged, on_validation, [final[column] for final in records]))
    return sorted(summaries, key=lambda summary: -summary.judged)


def tabulate_settings(summaries: Sequence[SettingSeeds], label: str) -> ReportTable | None:
    """Mean and standard deviation over seeds, the best first; None where no setting has several seeds."""
    if all(len(summary.values) < 2 for summary in summaries):
        return None
    rows = [
        [
            Cell(summary.name),
            Cell(f"{summary.judged:.4f}", summary.judged),
            Cell(f"{summary.spread.mean:.4f} ± {summary.spread.deviation:.4f}", summary.spread.mean),
            Cell(str(len(summary.values)), len(summary.values)),
        ]
        for summary in summaries
    ]
    judged = "validation" if summaries[0].on_validation else "test"
    caption = f"Settings by their mean {judged} {label} over seeds; ± is the standard deviation over seeds."
    headers = ["setting", f"mean {judged} {label}", f"test {label}", "seeds"]
    return ReportTable("settings", caption, headers, rows)


def answer_comparison(runs: Sequence[ReportRun]) -> str:
    """The answer of several runs: which has the highest final value, and whether the next one differs from it."""
    metric, settings = runs[0].metrics[0], summarize_settings(runs)
    if any(len(summary.values) > 1 for summary in settings):
        best_setting, *others = settings
        judged = "validation" if best_setting.on_validation else "test"
        test = f"mean test {metric.label} {best_setting.spread.mean:.4f} ± {best_setting.spread.deviation:.4f}"
        return (
            f"Of {len(settings)} settings, {best_setting.name} has the highest mean {judged} {metric.label} over its "
            f"seeds; it has a {test} over {len(best_setting.values)} seeds"
            + (f", and the next one, {others[0].name}, has {others[0].spread.mean:.4f}." if others else ".")
        )
    known = {run.name: (run.final or {}).get(metric.columns[0]) for run in runs}
    finals: dict[str, float] = {name: value for name, value in known.items() if value is not None}
    measured = sorted((run for run in runs if run.name in finals), key=lambda run: -finals[run.name])
    if len(measured) < 2:
        return "Fewer than two runs have been evaluated, so that nothing can be compared yet."
    best, second = measured[:2]
    sentence = (
        f"Of {len(measured)} runs, {best.name} has the highest test {metric.label}, {finals[best.name]:.4f}, "
        f"followed by {second.name} with {finals[second.name]:.4f}"
    )
    best_rows, second_rows = best.scored, second.scored
    same_rows = (
        best_rows is not None and second_rows is not None and best_rows.labels.tolist() == second_rows.labels.tolist()
    )
    if metric.text != "auc" or not same_rows or best_rows is None or second_rows is None:
        return f"{sentence}."
    tested = delong_test(best_rows.labels, best_rows.scores, second_rows.scores)
    verdict = "a significant" if tested.p_value < SIGNIFICANCE else "not a significant"
    return f"{sentence}: {verdict} difference (DeLong's paired test, p = {format_p_value(tested.p_value).lstrip('=')})."


def list_facts(run: ReportRun) -> list[tuple[str, str, str]]:
    """The numbers at the top of a page: name, value, and a line below it."""
    final, metrics = run.final or {}, run.metrics
    last = run.records[-1] if run.records else {}
    facts = []
    for metric in metrics[:2]:
        value = final.get(metric.columns[0])
        if value is None:
            continue
        ends = [final.get(column) for column in metric.columns[1:]]
        below = f"95 % interval {ends[0]:.3f} to {ends[1]:.3f}" if ends and None not in ends else "on the test rows"
        facts.append((f"test {metric.label}", f"{value:.3f}", below))
    if run.privacy is not None and (spent := run.spent_epsilon) is not None:
        below = f"spent, at delta {run.privacy['delta']:g}, for each {run.privacy['unit']}"
        facts.append(("epsilon", f"{spent:.3g}", below))
    if run.roster is not None:
        noun = client_noun(run)
        groups = run.roster.group_count
        below = f"in {groups:,} groups that take turns" if groups > 1 else "in one group"
        facts.append((f"{noun}s", f"{run.roster.clients:,}", below))
    if last:
        total = f"of {run.roster.rounds:,}" if run.roster is not None else "so far"
        below = f"{last['visits']:,} visits, {last['absences']:,} absence{'s' * (last['absences'] != 1)}"
        below = "of the schedule" if run.hides_clients else below
        facts.append(("rounds", f"{last['rounds']:,} {total}" if not run.done else f"{last['rounds']:,}", below))
        if not run.hides_clients:
            sent = last["bytes_up"] + last["bytes_down"]
            below = f"{format_bytes(last['bytes_up'])} up, {format_bytes(last['bytes_down'])} down"
            facts.append(("traffic", format_bytes(sent), below))
        if last.get("seconds") is not None:
            facts.append(("training time", format_seconds(last["seconds"]), "with evaluations"))
    return facts


def list_page_caveats(runs: Sequence[ReportRun]) -> list[str]:
    """What a reader must know before reading any number."""
    notes = list(dict.fromkeys(run.note for run in runs if has_caveat(run.note)))
    unfinished = [run.name for run in runs if not run.done]
    if unfinished:
        stopped = [f"{run.name} was stopped: {run.status}" for run in runs if run.status not in ("done", "unfinished")]
        going = [run.name for run in runs if run.status == "unfinished"]
        notes += stopped + (
            [f"Not finished: {', '.join(going)}. Sections that need scores are empty."] if going else []
        )
    if not any(run.is_federation for run in runs):
        notes.append(
            "This is a simulation: the rows of all clients were in one place, and training treated them as if they "
            "were apart."
        )
    return notes


def describe_privacy(run: ReportRun) -> list[tuple[str, str]]:
    """What leaves a client, and which protection there is: names and sentences."""
    noun, recipe = client_noun(run), run.recipe
    where = (
        "The rows stayed at the sites. The following left them."
        if run.is_federation
        else "Nothing left any machine, because the clients were simulated in one place. In a federation of this "
        "configuration, the following would leave a client."
    )
    guarantee, sums = run.privacy or {}, [member for member in recipe.transforms if isinstance(member, SecureSum)]
    lines = [("Where the rows were", where), ("Once, at the start", _describe_start(run, guarantee))]
    update = "What the algorithm averages: the change of the model's weights"
    update += ", with dual variables or control variates where the algorithm has them."
    if run.records and run.records[-1]["visits"]:
        last = run.records[-1]
        per_visit = format_bytes(round(last["bytes_up"] / max(1, last["visits"])))
        update += f" A visit sent {per_visit} on average."
    lines.append(("In each visit", update))
    if recipe.algorithm.emits_histograms:
        who = "server" if guarantee.get("unit") == "client" and not has_client_noise(recipe) else noun
        noise = f", to which the {who} adds noise" if guarantee else ""
        text = f"Histograms of model scores of sampled rows, one per class{noise}. No single score."
        lines.append(("Scores of rows", text))
    elif recipe.algorithm.scoring_pass:
        text = (
            f"The {recipe.algorithm.name} algorithm compares rows across {noun}s, so that model scores of sampled "
            "rows leave them, separately for positives and negatives, without the rows themselves."
        )
        if isinstance(recipe.algorithm, CompositionalPairwise):
            text += f" With the score of a positive goes an estimate that its {noun} keeps of it."
        lines.append(("Scores of rows", text))
    transforms = ", ".join(transform.name for transform in recipe.transforms)
    lines.append(("Changes to uploads", f"Applied in this order: {transforms}." if transforms else "None."))
    if run.is_federation:
        sent = {
            "none": "Nothing: the server does not evaluate.",
            "histograms": "Histograms of the held-out rows' scores per class.",
            "scores": "Every held-out row's score with its label: the server is a trusted evaluator.",
        }
        text = sent[run.policy["evaluation"]]
        if fraction := run.policy.get("validation_fraction"):
            text += f" The same of the validation rows, {fraction:g} of each class of a {noun}'s training rows."
        lines.append(("For the evaluation", text))
    lines += [("At the end", calibration)] if (calibration := _describe_calibration(run)) else []
    lines.append(
        ("Never", f"{_describe_hidden_features(run)}; labels, except as counts per class{_except_scores(run)}.")
    )
    if guarantee:
        return [*lines, *_describe_guarantee(run, guarantee)]
    lines.append(
        (
            "Formal privacy",
            "None. No noise for differential privacy is added. The server learns sums of uploads and no single one, "
            "but sums and scores can reveal something about single rows."
            if sums
            else "None. No noise for differential privacy is added and uploads are not summed securely, so that the "
            "server sees each upload. Uploads and scores can reveal something about single rows.",
        )
    )
    return lines


def _describe_start(run: ReportRun, guarantee: dict[str, Any]) -> str:
    """What leaves a client before the first round: class counts, and the summaries that features are prepared from."""
    noun = client_noun(run)
    text = f"The number of positive and of negative rows of the {noun}."
    if has_client_noise(run.recipe):
        text = f"That the {noun} has rows, but not how many of which class."
    if "class counts" in guarantee.get("one_off", {}):
        text += " The server adds noise to their sum before anybody else sees it."
    if "standardisation" in guarantee.get("one_off", {}):
        return f"{text} Sums and squares of the columns, to which the server adds noise before the inputs are scaled."
    traffic = run.preparation
    if traffic is None or not traffic.sites:
        return text if traffic is None else f"{text} Whether its table fits the schema; no summary of a column."
    size = "" if run.hides_clients else f" ({format_bytes(traffic.bytes_up)} from all {noun}s together)"
    text += f" Summaries of its training rows, from which the inputs are prepared{size}. Of a column of numbers or "
    text += "dates: how many rows have a value and how many have none, the mean"
    if run.is_federation:
        text += ", and the sum of squared deviations."
    else:
        text += ", the sum of squared deviations, the smallest and the largest value."
    if run.config.get("data", {}).get("numbers") == "quantiles":
        text += " Of a column of numbers also a sketch of its quantiles: how many values lie in each narrow range."
    open_column = "categories that the schema does not list" if run.is_federation else "categories"
    text += f" Of a column of {open_column}: which values the {noun} has, and how many rows have each, unless nearly "
    text += "all of them differ."
    if run.is_federation:
        text += " What fewer rows share than the site's policy asks for is left out."
    return text + (" No noise is added to these summaries, which count as public." if guarantee else "")


def _describe_calibration(run: ReportRun) -> str:
    """What leaves a client when the trained model is calibrated; empty where it is not."""
    if run.is_federation:
        return "Nothing: a site calibrates the model that it receives, and chooses thresholds, by its own rows."
    if not run.scorer:
        return ""
    part = run.scorer["calibrated_on"]
    return (
        f"For the calibration of probabilities: the range of the scores of the {part} rows, then for bins that all "
        f"clients share, how many {part} rows of each class are in them, and the sums of their scores. A federation on "
        "several machines calibrates at each site instead, and sends nothing for it."
    )


def _describe_hidden_features(run: ReportRun) -> str:
    """What is never sent of the features; the summaries of a table may hold single values of them."""
    if run.preparation is None or not run.preparation.sites:
        return "A row's features"
    if run.is_federation:
        return "A row's features, except that a category is named which enough rows have"
    return "A row as a whole; single values, except the smallest and the largest of a column and its categories"


def _describe_guarantee(run: ReportRun, guarantee: dict[str, Any]) -> list[tuple[str, str]]:
    """What a private run promises, what that takes as public, and what it does not protect."""
    sentence = summarize_guarantee(guarantee)
    lines = [
        ("Formal privacy", f"{sentence[0].upper()}{sentence[1:]}."),
        ("Spent", f"{describe_spending(guarantee, run.folder.read_records()).capitalize()}."),
        ("Not protected", " ".join(guarantee["not_protected"])),
    ]
    withheld = run.result.get("not_released", {})
    return [*lines, *((f"Left out: {name}", f"{reason[0].upper()}{reason[1:]}.") for name, reason in withheld.items())]


def format_seconds(seconds: float) -> str:
    """A duration in words that fit a tile.

    >>> format_seconds(3.04), format_seconds(75), format_seconds(7300)
    ('3.0 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _describe_training(run: ReportRun) -> str:
    noun = client_noun(run)
    over = "" if run.roster is None else f" with {run.roster.clients:,} {noun}{'s' * (run.roster.clients != 1)}"
    final, done = run.final, run.rounds_done
    if final is not None and final["rounds"] < done:
        saved = "(this is the model that was saved)"
        return f"After {final['rounds']:,} of {done:,} rounds of {run.recipe.method}{over} {saved}"
    return f"After {done:,} rounds of {run.recipe.method}{over}"


def _except_scores(run: ReportRun) -> str:
    algorithm = run.recipe.algorithm
    rows = ["beside scores of sampled rows"] if algorithm.scoring_pass and not algorithm.emits_histograms else []
    rows += ["beside scores for the evaluation"] if run.policy.get("evaluation") == "scores" else []
    return "".join(f" and {where}" for where in rows)


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"
