"""Members from outside the library: registered by hand, by a module's name, or by an installed package."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from torch import Tensor

import fedauc
from fedauc import plugins
from fedauc.algorithms import Method, find_methods
from fedauc.algorithms._local import apply_mean_change
from fedauc.algorithms.fedavg import LocalSGD
from fedauc.discovery import lookup
from fedauc.experiments.config import Config, list_families
from fedauc.experiments.options import build_config, list_options
from fedauc.experiments.recipe import Recipe
from fedauc.interfaces import Cohort, Model, Phase, Server, Setting, Upload
from fedauc.objectives import find_objectives
from fedauc.objectives.kinds import GapObjective

LOSS = """
from fedauc.objectives.kinds import GapObjective
class Steep(GapObjective):
    name = "{name}"
    def pair_loss(self, gap):
        return (-gap).exp()
"""

Write = Callable[[str, str], None]


@dataclass(frozen=True, kw_only=True)
class Steep(GapObjective):
    """psi(t) = exp(-t)."""

    name: ClassVar[str] = "plunge"

    def pair_loss(self, gap: Tensor) -> Tensor:
        return (-gap).exp()


@dataclass(frozen=True, kw_only=True)
class Slow(LocalSGD):
    """FedAvg under another name."""

    name: ClassVar[str] = "slow"

    def init(self, setting: Setting, model: Model) -> Server:
        return Server(shared=model, anchor=model)

    def merge(self, setting: Setting, server: Server, reduced: Upload, cohort: Cohort, phase: Phase) -> Server:
        return server._replace(shared=apply_mean_change(server.shared, reduced))


def make_module(name: str, **values: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(values)
    return module


def make_class(class_name: str, base: type, **attributes: Any) -> type:
    return type(class_name, (base,), {"__module__": __name__, **attributes})


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes modules that Python can import until the test ends."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def install_package(folder: Path, package: str, value: str) -> None:
    """What an installer leaves of a package with one entry point."""
    info = folder / f"{package.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[fedauc.plugins]\nany = {value}\n")


def register_anything(item: Any) -> None:
    fedauc.register(item)


def test_a_registered_class_is_found_by_its_name_and_the_decorator_returns_it() -> None:
    assert "plunge" not in find_objectives()
    assert fedauc.register(Steep) is Steep
    assert find_objectives()["plunge"] is Steep


def test_what_was_listed_before_a_registration_is_listed_anew() -> None:
    assert "plunge" not in str(list_families())
    assert "plunge" not in str(list_options())
    fedauc.register(Steep)
    objectives = next(family for family in list_families() if family.kind == "objective")
    assert objectives.members["plunge"] is Steep
    assert "plunge" in next(option.help for option in list_options() if option.name == "objective")
    config = build_config("cycp-pairwise", None, {"objective": "plunge"})
    assert config.recipe.algorithm.objective == Steep()


def test_a_registered_method_trains_under_its_name() -> None:
    fedauc.register(Slow)
    fedauc.register(Method("slow-cycle", Slow, "cyclic", 0.3))
    recipe = Recipe.of("slow-cycle", groups=2)
    assert (recipe.algorithm, recipe.learning_rate) == (Slow(), 0.3)


def test_a_module_registers_its_members_and_methods(write_module: Write) -> None:
    write_module("own_losses", LOSS.format(name="own") + "class _Draft(GapObjective):\n    pass\n")
    module = __import__("own_losses")
    assert fedauc.register(module) is module
    assert find_objectives()["own"] is module.Steep


def test_a_class_that_is_defined_again_replaces_its_old_self() -> None:
    """As when a cell of a notebook runs twice."""
    for value in (1.0, 2.0):
        again = make_class("Again", GapObjective, name="again", pair_loss=abs, value=value)
        fedauc.register(again)
    assert getattr(find_objectives()["again"], "value", None) == 2.0


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            make_class("Other", GapObjective, name="sigmoid", pair_loss=abs),
            "Objective name 'sigmoid' is used by fedauc.objectives.sigmoid.PairwiseSigmoid and by test_plugins.Other; "
            "give one of them another name",
        ),
        (
            Method("fedavg", Slow, "cyclic", 0.1),
            "method name 'fedavg' is used by fedauc.algorithms.fedavg and by test_plugins; give one of them another "
            "name",
        ),
        (
            make_class("Half", GapObjective, name="half"),
            "test_plugins.Half lacks pair_loss; define it there, so that the class is complete",
        ),
        (
            make_class("Nameless", GapObjective, pair_loss=abs),
            'test_plugins.Nameless has no name of its own; add name: ClassVar[str] = "..." to the class',
        ),
        (
            make_class("Heir", Steep),
            'test_plugins.Heir has no name of its own; add name: ClassVar[str] = "..." to the class',
        ),
        (
            make_class("Stranger", object, name="stranger"),
            "test_plugins.Stranger derives from no base class of fedauc that has members; derive it from one, such as "
            "fedauc.interfaces.Objective",
        ),
        (
            make_class("Odd", GapObjective, name="a/b c,d", pair_loss=abs),
            "test_plugins.Odd has the name 'a/b c,d'; a name consists of letters a-z, digits, '-' and '_': rename it",
        ),
        (
            Method("a b", Slow, "cyclic", 0.1),
            "a method of test_plugins has the name 'a b'; a name consists of letters a-z, digits, '-' and '_': "
            "rename it",
        ),
        (
            Slow(),
            "register takes a class, a Method or a module, not Slow(objective=Logistic(score='identity', draw='rows'), "
            "weight_decay=0.0); register the class of an instance",
        ),
        (
            make_module("single", METHODS=Method("slow", Slow, "cyclic", 0.1)),
            "METHODS of the plug-in 'single' is a Method; it must be a tuple of Methods: write METHODS = "
            "(Method(...),)",
        ),
        (
            ModuleType("hollow"),
            "the plug-in 'hollow' has no member: it needs a class with a name that derives from a base class of "
            "fedauc, or METHODS",
        ),
    ],
)
def test_what_cannot_be_a_member_is_refused_and_nothing_changes(item: Any, message: str) -> None:
    before = (find_objectives(), find_methods())
    with pytest.raises(ValueError) as caught:
        register_anything(item)
    assert str(caught.value) == message
    assert (find_objectives(), find_methods()) == before


def test_two_plugins_with_one_name_are_both_named(write_module: Write) -> None:
    write_module("first_plugin", LOSS.format(name="own"))
    write_module("second_plugin", LOSS.format(name="own"))
    fedauc.register(__import__("first_plugin"))
    with pytest.raises(ValueError, match=r"'own' is used by first_plugin\.Steep and by second_plugin\.Steep; give one"):
        fedauc.register(__import__("second_plugin"))


def test_the_environment_variable_names_modules(write_module: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module("first_plugin", LOSS.format(name="one"))
    write_module("second_plugin", LOSS.format(name="two"))
    monkeypatch.setenv(plugins.VARIABLE, "first_plugin, second_plugin")
    assert {"one", "two"} <= set(find_objectives())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import absent_package",
            r"the plug-in 'broken' cannot be imported: ModuleNotFoundError: No module named 'absent_package' "
            r"\(broken\.py, line 1\)",
        ),
        (
            "x = 1\nx / 0",
            r"the plug-in 'broken' cannot be imported: ZeroDivisionError: division by zero \(broken\.py, line 2\)",
        ),
        ("raise SystemExit(3)", r"the plug-in 'broken' cannot be imported: SystemExit: 3 \(broken\.py, line 1\)"),
        ("def", r"the plug-in 'broken' cannot be imported: SyntaxError: invalid syntax \(broken\.py, line 1\)$"),
        ("x = 1", r"the plug-in 'broken' has no member: it needs "),
    ],
)
def test_a_module_that_was_asked_for_must_work(
    write_module: Write, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    write_module("broken", text)
    monkeypatch.setenv(plugins.VARIABLE, "broken")
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{message}") as caught:
            find_objectives()
        assert "\n" not in str(caught.value)


def test_a_module_that_does_not_exist_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugins.VARIABLE, "absent_module")
    with pytest.raises(ValueError, match=r"^there is no plug-in module 'absent_module' here; install the package that"):
        find_objectives()


@pytest.mark.parametrize("name", ["zoo.py", "./zoo.py", "folder/zoo"])
def test_a_file_instead_of_a_module_has_a_hint(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(plugins.VARIABLE, name)
    with pytest.raises(ValueError, match=f"^the plug-in '{name}' is a file; name its module: write zoo, and run in"):
        find_objectives()


def test_an_installed_package_is_found_by_its_entry_point(write_module: Write, tmp_path: Path) -> None:
    write_module("packaged", LOSS.format(name="packaged"))
    install_package(tmp_path, "my-losses", "packaged")
    plugins.load_registrations({"seen": set()})
    assert find_objectives()["packaged"].__module__ == "packaged"
    assert plugins.package_of("packaged") == "my-losses 1.2"


@pytest.mark.parametrize(
    ("text", "value", "reason"),
    [
        ("x / 0", "packaged", "the plug-in 'packaged' cannot be imported: NameError: name 'x' is not defined"),
        ("", "packaged", "the plug-in 'packaged' has no member"),
        ("", "elsewhere", "there is no plug-in module 'elsewhere' here"),
        ("", "packaged:Steep", "its entry point is 'packaged:Steep'; it must name a module, such as 'packaged'"),
    ],
)
def test_a_broken_package_is_named_in_one_line_and_the_library_goes_on(
    write_module: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, value: str, reason: str
) -> None:
    write_module("packaged", text)
    install_package(tmp_path, "my-losses", value)
    plugins.load_registrations({"seen": set()})
    with caplog.at_level(logging.WARNING, "fedauc"):
        assert "sigmoid" in find_objectives()
        find_objectives()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"the installed package my-losses 1.2 cannot be used: {reason}")
    assert line.endswith("; fedauc goes on without it")


def test_a_configuration_names_the_plugins_that_it_uses(write_module: Write, tmp_path: Path) -> None:
    write_module("packaged", LOSS.format(name="packaged").replace("class", "@D\nclass").replace("from", DATACLASS, 1))
    install_package(tmp_path, "my-losses", "packaged")
    plugins.load_registrations({"seen": set()})
    fedauc.register(Slow)
    fedauc.register(Method("slow-cycle", Slow, "cyclic", 0.3))
    own = build_config("slow-cycle", None, {})
    assert own.to_document()["plugins"] == {"test_plugins": None}
    config = build_config("cycp-pairwise", None, {"objective": "packaged"})
    assert config.to_document()["plugins"] == {"packaged": "my-losses"}
    assert Config.from_json(config.to_json()) == config
    assert "plugins" not in build_config("cycp-pairwise", None, {}).to_document()


DATACLASS = "from dataclasses import dataclass\nD = dataclass(frozen=True, kw_only=True)\nfrom"


def test_a_member_that_is_not_registered_cannot_be_written() -> None:
    config = Config(recipe=Recipe.of("cycp-pairwise", objective=Steep()))
    with pytest.raises(ValueError, match=r"^test_plugins\.Steep is not registered, so no other process could find it"):
        config.to_json()


def test_reading_a_configuration_imports_its_plugins(write_module: Write, tmp_path: Path) -> None:
    write_module("packaged", LOSS.format(name="packaged").replace("class", "@D\nclass").replace("from", DATACLASS, 1))
    with plugins.restore_registrations():
        fedauc.register(__import__("packaged"))
        text = build_config("cycp-pairwise", None, {"objective": "packaged"}).to_json()
    assert "packaged" not in find_objectives()
    assert Config.from_json(text).recipe.algorithm.objective.name == "packaged"


@pytest.mark.parametrize(
    ("module", "package", "reason"),
    [
        (
            "absent_module",
            "my-losses",
            "there is no plug-in module 'absent_module' here; install the package that has it, add its folder to "
            "PYTHONPATH, or run in its folder; it belonged to the package my-losses",
        ),
        (
            "__main__",
            None,
            "a script or notebook defined its own members; move them to a module of their own, and name it in "
            "FEDAUC_PLUGINS or with --plugin",
        ),
    ],
)
def test_a_configuration_whose_plugin_is_missing_says_which(module: str, package: str | None, reason: str) -> None:
    with plugins.restore_registrations():
        fedauc.register(Steep)
        text = build_config("cycp-pairwise", None, {"objective": "plunge"}).to_json()
    text = text.replace('"test_plugins": null', f'"{module}": {f"{chr(34)}{package}{chr(34)}" if package else "null"}')
    with pytest.raises(ValueError) as caught:
        Config.from_json(text, "config.json")
    assert str(caught.value) == f"config.json has an unknown objective 'plunge', because {reason}"
    # Registered from elsewhere, the members are found although the module is missing.
    fedauc.register(Steep)
    assert Config.from_json(text).recipe.algorithm.objective == Steep()


def test_a_method_with_an_unknown_schedule_is_refused_by_its_name() -> None:
    fedauc.register(Slow)
    fedauc.register(Method("slow-cycle", Slow, "cylic", 0.3))
    with pytest.raises(ValueError, match="unknown participation 'cylic': did you mean 'cyclic'"):
        Recipe.of("slow-cycle")
    assert lookup("method", "slow-cycle", find_methods()).algorithm is Slow
