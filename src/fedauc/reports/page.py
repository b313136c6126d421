"""The report as one HTML page that needs no network, and as JSON for a page that updates itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from fedauc.reports.page_sections import Section, build_sections, choose_detailed_runs, judge_run
from fedauc.reports.plotly_figures import to_plotly
from fedauc.reports.report_runs import ReportRun
from fedauc.version import VERSION

if TYPE_CHECKING:
    from jinja2 import Environment

INSTALL = "run pip install jinja2 plotly"


def render_page(runs: Sequence[ReportRun], live: bool = False) -> str:
    """The page of these runs; a live one asks its server for new numbers."""
    environment, sections = _make_environment(), build_sections(runs, live)
    files = resources.files("fedauc.reports") / "html"
    content, detailed = _describe_content(environment, sections), choose_detailed_runs(runs)
    return environment.get_template("page.html").render(
        title=_name_page(runs),
        runs=[run.name for run in detailed],
        chosen=detailed.index(max(detailed, key=judge_run)),
        sections=sections,
        texts=content["texts"],
        figures=_embed_json(content["figures"]),
        style=(files / "report.css").read_text(encoding="utf-8"),
        script=(files / "report.js").read_text(encoding="utf-8"),
        plotly=_read_plotly(),
        live=live,
        version=VERSION,
    )


def build_document(runs: Sequence[ReportRun]) -> dict[str, Any]:
    """What a live page that is open already needs to show the newest numbers."""
    return _describe_content(_make_environment(), build_sections(runs, live=True)) | {"title": _name_page(runs)}


def block_key(section: str, block: int) -> str:
    """The name of a block on the page.

    >>> block_key("sites", 2)
    'sites-2'
    """
    return f"{section}-{block}"


def _describe_content(environment: Environment, sections: Sequence[Section]) -> dict[str, Any]:
    """The HTML of every block's text, and the specification and summary of every figure."""
    render_parts = environment.get_template("parts.html").module.render_parts  # type: ignore[attr-defined]
    texts, figures, summaries = {}, {}, {}
    for section in sections:
        for number, block in enumerate(section.blocks):
            key = block_key(section.key, number)
            texts[key] = str(render_parts(block.parts))
            for figure in block.figures:
                figures[f"{key}-{figure.key}"] = to_plotly(figure)
                summaries[f"{key}-{figure.key}"] = figure.summary
    return {"texts": texts, "figures": figures, "summaries": summaries}


def _make_environment() -> Environment:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ValueError(f"jinja2 is not installed; a report needs it: {INSTALL}") from error
    environment = Environment(
        loader=PackageLoader("fedauc.reports", "html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["block_key"] = block_key
    environment.tests["named"] = lambda part, name: type(part).__name__ == name
    return environment


def _read_plotly() -> str:
    """The script of plotly.js, from the Python package."""
    try:
        package = resources.files("plotly")
    except ImportError as error:
        raise ValueError(f"plotly is not installed; a report needs it: {INSTALL}") from error
    return (package / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def _name_page(runs: Sequence[ReportRun]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"


def _embed_json(value: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
