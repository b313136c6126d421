"""Before the first round: every site checks its table against the schema, and reports sums from which the server
prepares the features: one shift and scale per number, one vocabulary per category, the same for all sites.

Sums of single sites are also compared: a column in other units at one site is within its range more often than not,
but its mean and its deviation are not those of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedauc.data.feature_fitting import FeatureSettings, choose_category_encoding, choose_number_encoding
from fedauc.data.features import CategoryColumn, DateColumn, FeatureColumn, FeatureEncoder, NumberColumn
from fedauc.data.summaries import NumberSummary, SummaryTraffic, merge_categories, merge_numbers, stack_numbers
from fedauc.federation.column_sums import ColumnSums, count_sum_traffic, read_sums
from fedauc.federation.exchange import LOG, AnswerRefused, Exchange, ExchangeResult, read_answer
from fedauc.federation.schema import DataSchema, SchemaColumn
from fedauc.federation.serialization import Payload, pack_payload
from fedauc.federation.versions import find_setting_problem
from fedauc.guards import TrainingStopped

SHIFT_LIMIT = 2.0
"""Distance of two means, in deviations of both columns together, from which units are suspected."""

RATIO_LIMIT = 4.0
"""Ratio of two deviations from which units are suspected."""

COMPARED_ROWS = 20
"""A site with fewer rows is not compared."""

FIELDS_DOWN = 2
"""Numbers that a site receives per column: the shift and the scale."""


class AgreedData(NamedTuple):
    """How every site prepares its rows, what that took, and what somebody should look at."""

    encoder: FeatureEncoder
    traffic: SummaryTraffic = SummaryTraffic()
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values for census.json."""
        return {"encoder": self.encoder.to_document(), "traffic": list(self.traffic), "warnings": list(self.warnings)}

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> AgreedData:
        """What `to_json` wrote."""
        encoder = FeatureEncoder.from_document(stored["encoder"])
        return AgreedData(encoder, SummaryTraffic(*stored["traffic"]), tuple(stored["warnings"]))


def agree_on_data(
    exchange: Exchange, schema: DataSchema, header: Mapping[str, Any], is_private: bool
) -> tuple[AgreedData, dict[int, str], dict[int, int]]:
    """Let every site check its table and report its sums.

    Returns why sites failed as well, and the number of rows of each site that has reported sums. In a private run no
    sums are asked for, because they are exact: the schema then holds every number that is needed.
    """
    needed = [column.name for column in schema.columns if column.needs_sums]
    if is_private and needed:
        remedy = "give numbers a center and a scale, and categories a vocabulary"
        raise ValueError(f"column {needed[0]!r} of the schema needs exact sums, which a private run hides: {remedy}")
    message = {**header, "kind": "summarize", "needed": needed, "asks_sums": not is_private}
    names, fraction = [site.name for site in exchange.sites], exchange.policy.validation_fraction
    result = exchange.ask_sites(
        {client: lambda name=name: pack_payload({**message, "site": name}) for client, name in enumerate(names)},  # type: ignore[misc]
        lambda client, payload: _read_answer(payload, schema, fraction),
        seconds=exchange.policy.registration_deadline,
    )
    report_failures(exchange, result)
    sums = {names[client]: answer for client, answer in sorted(result.answers.items()) if answer is not None}
    columns, ignored = _fit_columns(schema, list(sums.values()))
    for name, reason in ignored.items():
        LOG.warning("column %r is left out: %s", name, reason)
    if not columns:
        raise ValueError(f"no column is left for features ({ignored}); change the schema")
    warnings = (
        *(f"column {name!r} is left out: {reason}" for name, reason in ignored.items()),
        *warn_of_units(schema, {name: site_sums.numbers for name, site_sums in sums.items()}),
    )
    for warning in warnings[len(ignored) :]:
        LOG.warning("%s", warning)
    encoder = FeatureEncoder(tuple(columns))
    rows = {client: max(answer.list_row_counts(), default=0) for client, answer in result.answers.items() if answer}
    return AgreedData(encoder, _count_traffic(encoder, sums), warnings), result.refused, rows


def report_failures(exchange: Exchange, result: ExchangeResult[Any]) -> None:
    """Name every site that has failed with its reason; by the server's policy the run stops, or goes on without it."""
    names = [site.name for site in exchange.sites]
    failures = [describe_failure(names[client], reason) for client, reason in sorted(result.refused.items())]
    for failure in failures:
        LOG.error("%s", failure)
    if failures and exchange.policy.on_site_failure == "stop":
        more = f" ({len(failures) - 1} more failed, see the log)" if len(failures) > 1 else ""
        awaits = "awaits approval" in failures[0]
        remedy = "approve it there and start the run again" if awaits else "correct it there"
        remedy = f"{remedy}, or set on-site-failure to 'continue'"
        raise TrainingStopped(f"{failures[0]}{more}; {remedy}")


def describe_failure(name: str, reason: str) -> str:
    """A failure as one line that begins with the site's name."""
    text = reason.removeprefix("the site reports: ")
    return text if text.startswith(f"site {name!r}") else f"site {name!r}: {text}"


def warn_of_units(schema: DataSchema, sums: Mapping[str, Mapping[str, NumberSummary]]) -> list[str]:
    """Sites whose column looks like one in other units: against the median site, or against each other if two."""
    warnings = []
    for column in schema.columns:
        known = {
            name: numbers[column.name]
            for name, numbers in sums.items()
            if column.name in numbers and numbers[column.name].counts[0] >= COMPARED_ROWS
        }
        if column.kind != "number" or len(known) < 2:
            continue
        means = {name: float(summary.mean[0]) for name, summary in known.items()}
        deviations = {name: float(np.sqrt(summary.squares[0] / summary.counts[0])) for name, summary in known.items()}
        if len(known) == 2:
            first, second = known
            if _are_far_apart(means[first], deviations[first], means[second], deviations[second]):
                described = f"mean {means[first]:.4g} at site {first!r} and {means[second]:.4g} at site {second!r}"
                warnings.append(f"column {column.name!r} has {described}; {_ask_about_units(column)}")
            continue
        middle, spread = float(np.median(list(means.values()))), float(np.median(list(deviations.values())))
        for name in known:
            if _are_far_apart(means[name], deviations[name], middle, spread):
                described = f"mean {means[name]:.4g} and deviation {deviations[name]:.4g} at site {name!r}"
                typical = f"{middle:.4g} and {spread:.4g} at the median site"
                warnings.append(f"column {column.name!r} has {described}, {typical}; {_ask_about_units(column)}")
    return warnings


def _are_far_apart(mean: float, deviation: float, other_mean: float, other_deviation: float) -> bool:
    """Whether two columns of the same name hardly overlap, or differ much in scale."""
    together = np.hypot(deviation, other_deviation)
    if abs(mean - other_mean) > SHIFT_LIMIT * together:
        return True
    small, large = sorted((deviation, other_deviation))
    return small > 0 and large / small > RATIO_LIMIT


def _ask_about_units(column: SchemaColumn) -> str:
    return f"are both in {column.unit}?" if column.unit else "are their units the same?"


def _read_answer(payload: Payload, schema: DataSchema, validation_fraction: float) -> ColumnSums | None:
    """The sums that a site sends; None where its policy, or the run, allows none."""
    header = read_answer(payload, "summarize")
    if problem := find_setting_problem(header, validation_fraction):
        raise AnswerRefused(problem)
    return read_sums(payload, schema) if header.get("has_sums") is True else None


def _fit_columns(schema: DataSchema, sums: list[ColumnSums]) -> tuple[list[FeatureColumn], dict[str, str]]:
    """The encoding of every column, and the reasons why some are left out; as a simulation fits them."""
    fitted, ignored = list[FeatureColumn](), dict[str, str]()
    for column in schema.columns:
        encoding, reason = _fit_column(column, sums)
        if encoding is None:
            ignored[column.name] = reason
        else:
            fitted.append(encoding)
    return fitted, ignored


def _fit_column(column: SchemaColumn, sums: list[ColumnSums]) -> tuple[FeatureColumn | None, str]:
    name, settings = column.name, FeatureSettings()
    if not column.needs_sums:
        return _encode_by_agreement(column, any(name in site.with_times for site in sums)), ""
    if column.kind == "category":
        return choose_category_encoding(name, merge_categories([site.categories[name] for site in sums]), settings)
    if not sums:
        return None, "no site has reported sums"
    merged = merge_numbers(stack_numbers([site.numbers[name] for site in sums]))
    has_time = any(name in site.with_times for site in sums)
    return choose_number_encoding(name, column.kind, merged, settings, has_time)


def _encode_by_agreement(column: SchemaColumn, has_time: bool) -> FeatureColumn:
    """The encoding that the schema alone decides."""
    if column.kind == "category":
        return CategoryColumn(column.name, tuple(sorted(column.categories)), has_missing=column.missing)
    assert column.center is not None
    assert column.scale is not None
    number = NumberColumn(column.name, column.center, column.center, column.scale, column.missing)
    if column.kind != "date":
        return number
    return DateColumn(number.name, number.fill, number.shift, number.scale, number.has_indicator, has_time)


def _count_traffic(encoder: FeatureEncoder, sums: Mapping[str, ColumnSums]) -> SummaryTraffic:
    traffic = SummaryTraffic(len(sums))
    for site_sums in sums.values():
        floats, texts = count_sum_traffic(site_sums)
        traffic = traffic.add(floats, 0, text_up=texts)
    vocabulary = sum(
        len(value.encode()) + 1
        for column in encoder.columns
        if isinstance(column, CategoryColumn)
        for value in column.values
    )
    return traffic.add(0, FIELDS_DOWN * len(encoder.columns), text_down=vocabulary)


def agreement_header(schema: DataSchema, agreed: AgreedData | None) -> dict[str, Any]:
    """What every message says of the data: the schema, and how rows are prepared once that is known."""
    header: dict[str, Any] = {"schema": schema.to_header()}
    return header if agreed is None else {**header, "encoder": agreed.encoder.to_document()}
