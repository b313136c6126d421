"""Options of which a configuration holds several members, such as `wrappers`."""

from __future__ import annotations

import pytest

from fedauc.algorithms import find_methods
from fedauc.experiments.config import Config
from fedauc.experiments.options import InapplicableOption, build_config, list_options
from fedauc.experiments.recipe import Recipe
from fedauc.wrappers import find_wrappers
from fedauc.wrappers.fedprox import FedProx
from fedauc.wrappers.momentum import Momentum


def test_several_members_are_applied_in_the_order_of_the_option() -> None:
    texts = {"wrappers": "momentum,fedprox", "wrappers.fedprox.mu": "0.3"}
    config = build_config("cycp-fedavg", None, texts)
    assert config.recipe.wrappers == (Momentum(), FedProx(mu=0.3))
    assert Config.from_json(config.to_json()) == config


def test_parameters_alone_change_the_members_of_a_configuration_file() -> None:
    base = build_config(None, None, {"wrappers": "fedprox,momentum", "wrappers.momentum.beta": "0.5"})
    changed = build_config(None, base, {"wrappers.fedprox.mu": "2"})
    assert changed.recipe.wrappers == (FedProx(mu=2.0), Momentum(beta=0.5))
    assert build_config(None, base, {"wrappers": "fedprox"}).recipe.wrappers == (FedProx(),)
    assert build_config(None, base, {"wrappers": "none"}).recipe.wrappers == ()


def test_no_wrapper_is_the_default_also_of_files_that_know_no_wrappers() -> None:
    config = build_config(None, None, {})
    assert config.recipe.wrappers == ()
    text = config.to_json()
    assert '"wrappers": []' in text
    assert Config.from_json(text.replace('"wrappers": [],', "")) == config


def test_every_parameter_of_every_member_has_an_option() -> None:
    names = {option.name for option in list_options() if option.name.startswith("wrappers.")}
    assert {"wrappers.fedprox.mu", "wrappers.momentum.beta", "wrappers.adam.beta1"} <= names
    assert {name.split(".")[1] for name in names} <= set(find_wrappers())


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"wrappers": "fedprox,fedprox"}, "wrappers lists 'fedprox' 2 times; list it once"),
        ({"wrappers": "fedpro"}, "unknown wrapper 'fedpro': did you mean 'fedprox'?"),
        ({"wrappers": "fedprox", "wrappers.fedprox.mu": "-1"}, "mu is -1.0; it must be a finite number of at least 0"),
    ],
)
def test_wrong_lists_are_refused(texts: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_config(None, None, texts)


def test_a_parameter_of_a_member_that_is_not_listed_is_refused() -> None:
    remedy = "wrappers.fedprox.mu is given, but wrappers is momentum; use --wrappers momentum,fedprox"
    with pytest.raises(InapplicableOption, match=remedy):
        build_config(None, None, {"wrappers": "momentum", "wrappers.fedprox.mu": "1"})


def test_a_recipe_takes_names_members_and_one_text() -> None:
    expected = (FedProx(), Momentum(beta=0.5))
    assert Recipe.of("fedavg", wrappers=["fedprox", Momentum(beta=0.5)]).wrappers == expected
    assert Recipe.of("fedavg", wrappers="fedprox,momentum").wrappers == (FedProx(), Momentum())
    assert Recipe.of("fedavg", wrappers=FedProx()).wrappers == (FedProx(),)
    with pytest.raises(ValueError, match="wrappers is \\(3,\\); it must be a tuple of Wrappers"):
        Recipe.of("fedavg", wrappers=[3])


@pytest.mark.parametrize("method", sorted(find_methods()))
def test_every_method_has_pooled_weighting_unless_the_user_chooses(method: str) -> None:
    config = build_config(method, None, {})
    assert config.recipe.weighting == Recipe.of(method).weighting == "pooled"
    assert Config.from_json(f'{{"recipe": {{"method": "{method}"}}}}').recipe.weighting == "pooled"
    # It is stored like any other setting, so that a later default does not change the run.
    assert '"weighting": "pooled"' in config.to_json()
    chosen = build_config(method, None, {"weighting": "clients"})
    assert chosen.recipe == Recipe.of(method, weighting="clients")
    # A configuration file has a value for every field, and these values stay.
    assert build_config(None, chosen, {"cycles": "3"}).recipe.weighting == "clients"


@pytest.mark.parametrize(
    "options",
    [{"epsilon": "8"}, {"wrappers": "example-dp", "epsilon": "8"}],
    ids=["client-dp", "example-dp"],
)
def test_a_private_run_counts_all_clients_alike_unless_the_user_chooses(options: dict[str, str]) -> None:
    assert build_config("cycp-fedavg", None, options).recipe.weighting == "clients"
    assert build_config("cycp-fedavg", None, {**options, "weighting": "pooled"}).recipe.weighting == "pooled"
    assert build_config("cycp-fedavg", None, {**options, "preset": "as-printed"}).recipe.weighting == "paper"
    settings = {name: float(text) if name == "epsilon" else text for name, text in options.items()}
    assert Recipe.of("cycp-fedavg", **settings).weighting == "clients"
    assert Recipe.of("cycp-fedavg", weighting="pooled", **settings).weighting == "pooled"
    text = '{"recipe": {"method": "cycp-fedavg", "epsilon": 8}}'
    assert Config.from_json(text).recipe.weighting == "clients"
    assert Config.from_json(text.replace("8", '8, "weighting": "pooled"')).recipe.weighting == "pooled"
    # An infinite budget protects nobody: the run is the plain one.
    assert build_config("cycp-fedavg", None, {**options, "epsilon": "inf"}).recipe.weighting == "pooled"
