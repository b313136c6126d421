"""The tables of a report in LaTeX, for the booktabs package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedauc.files import write_atomically
from fedauc.reports.page_sections import Folded, Part, build_sections, choose_detailed_runs
from fedauc.reports.report_runs import ReportRun
from fedauc.reports.report_tables import ReportTable, tabulate_summary

SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "–": "--",
}


def write_latex_tables(runs: Sequence[ReportRun], folder: Path) -> list[Path]:
    """Write every table of the page into a file of its own; tables of single runs carry the run's number from 1."""
    folder.mkdir(parents=True, exist_ok=True)
    several, tables = len(choose_detailed_runs(runs)) > 1, {"summary": tabulate_summary(runs)}
    for section in build_sections(runs):
        for block in section.blocks:
            number = f"-run{block.run + 1}" if several and block.run is not None else ""
            for table in _list_tables(block.parts):
                tables[table.key + number] = table._replace(key=table.key + number)
    paths = []
    for name, table in tables.items():
        paths.append(folder / f"{name}.tex")
        write_atomically(paths[-1], render_latex(table).encode())
    return paths


def render_latex(table: ReportTable) -> str:
    """A table environment with booktabs rules.

    >>> print(render_latex(ReportTable("t", "A & B.", ["run", "AUC"], [])))
    \\begin{table}
      \\centering
      \\caption{A \\& B.}
      \\label{tab:t}
      \\begin{tabular}{lr}
        \\toprule
        run & AUC \\\\
        \\midrule
        \\bottomrule
      \\end{tabular}
    \\end{table}
    <BLANKLINE>
    """
    lines = [" & ".join(map(escape_latex, table.headers))]
    lines += [" & ".join(escape_latex(cell.text) for cell in row) for row in table.rows]
    head, *body = (f"    {line} \\\\" for line in lines)
    return "\n".join(
        [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{escape_latex(table.caption)}}}",
            rf"  \label{{tab:{table.key}}}",
            rf"  \begin{{tabular}}{{l{'r' * (len(table.headers) - 1)}}}",
            r"    \toprule",
            head,
            r"    \midrule",
            *body,
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def escape_latex(text: str) -> str:
    """Text with LaTeX's special characters escaped.

    >>> escape_latex("5 % of_a [0.1, 0.2]")
    '5 \\\\% of\\\\_a [0.1, 0.2]'
    """
    return "".join(SPECIAL.get(character, character) for character in text)


def _list_tables(parts: Sequence[Part]) -> Iterator[ReportTable]:
    for part in parts:
        if isinstance(part, ReportTable):
            yield part
        elif isinstance(part, Folded):
            yield from _list_tables(part.parts)
