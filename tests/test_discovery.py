"""Folders are discovered: a member is one file, found by its class, never registered."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedauc.discovery import find_members, import_modules, lookup

BASE = """
from abc import ABC, abstractmethod
class Base(ABC):
    @abstractmethod
    def go(self): ...
"""

MEMBER = """
from zoo.base import Base
class {klass}(Base):
    name = "{name}"
    def go(self): ...
"""

ZOO = {
    "__init__": "",
    "base": BASE,
    "zebra": MEMBER.format(klass="Zebra", name="zebra"),
    "ant": MEMBER.format(klass="Ant", name="the-ant"),
    # Hidden module, abstract class, nameless class, class imported from elsewhere: none of these is a member.
    "_hidden": MEMBER.format(klass="Hidden", name="hidden"),
    "abstract": "from zoo.base import Base\nclass Half(Base): ...\n",
    "nameless": "from zoo.base import Base\nclass Nameless(Base):\n    def go(self): ...\n",
    "borrower": "from zoo._hidden import Hidden\n",
    "stranger": "class Stranger:\n    name = 'stranger'\n",
}


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    folder = tmp_path / "zoo"
    folder.mkdir()
    for stem, text in ZOO.items():
        (folder / f"{stem}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    (base,) = (module for module in import_modules("zoo") if module.__name__ == "zoo.base")
    yield base.Base
    for loaded in [name for name in sys.modules if name.split(".")[0] == "zoo"]:
        del sys.modules[loaded]


def test_modules_are_the_public_files_in_alphabetical_order(zoo: type) -> None:
    stems = [module.__name__ for module in import_modules("zoo")]
    assert stems == [f"zoo.{s}" for s in ("abstract", "ant", "base", "borrower", "nameless", "stranger", "zebra")]


def test_members_are_the_concrete_named_classes_of_each_file(zoo: type) -> None:
    members: dict[str, type] = find_members("zoo", zoo)
    assert {name: kind.__name__ for name, kind in members.items()} == {"the-ant": "Ant", "zebra": "Zebra"}


def test_a_new_file_is_a_new_member(zoo: type, tmp_path: Path) -> None:
    (tmp_path / "zoo" / "bee.py").write_text(MEMBER.format(klass="Bee", name="bee"))
    assert "bee" in find_members("zoo", zoo)


def test_lookup_returns_the_member() -> None:
    assert lookup("loss", "b", {"a": 1, "b": 2}) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cyclc", "unknown schedule 'cyclc': did you mean 'cyclic'? known: cyclic, full"),
        ("zzzz", "unknown schedule 'zzzz': known: cyclic, full"),
        ("", "unknown schedule '': known: cyclic, full"),
    ],
)
def test_an_unknown_name_is_refused_with_what_is_known(name: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        lookup("schedule", name, {"full": 0, "cyclic": 1})
    assert str(caught.value) == message


def test_a_named_class_that_lacks_a_method_says_which(zoo: type, tmp_path: Path) -> None:
    (tmp_path / "zoo" / "yak.py").write_text("from zoo.base import Base\nclass Yak(Base):\n    name = 'yak'\n")
    with pytest.raises(ValueError) as caught:
        find_members("zoo", zoo)
    message = "Yak (named 'yak') lacks the method go; define it, or drop its name if it is a base class"
    assert str(caught.value) == message
