"""The documentation site: no page is left out, no link leads nowhere, and the reference covers every public name.

`make docs` builds it, in an environment of its own; these tests need nothing but the Markdown.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fedauc

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def find_anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_table_of_contents_once() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    entries = [
        name for block in re.findall(r"```{toctree}\n(.*?)```", index, flags=re.DOTALL) for name in block.split()
    ]
    listed = sorted(name for name in entries if (ROOT / "docs" / f"{name}.md").exists())
    assert listed == [page.stem for page in PAGES if page.stem != "index"]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        assert not anchor or anchor in find_anchors(linked), target


def test_the_reference_covers_every_public_name() -> None:
    described = set(re.findall(r"auto\w+:: fedauc\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE))
    assert described >= {name for name in fedauc.__all__ if not name.startswith("__")}
