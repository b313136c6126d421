"""Settings of a run are compared with the app's before Flower is asked, which would refuse them without a name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_helpers import fedauc
from fedauc.federation.app_settings import merge_settings, read_settings, read_template_config


def test_settings_replace_those_of_the_app(tmp_path: Path) -> None:
    config = read_template_config(tmp_path)
    merged = merge_settings(config, read_settings('cycles=5 options="local-steps=8 model.hidden=64"'))
    assert merged == {**config, "cycles": 5, "options": "local-steps=8 model.hidden=64"}


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ("cycels=5", "did you mean 'cycles'?"),
        ("on_site_failure='stop'", "did you mean 'on-site-failure'?"),
        ("patience=3", "add it there to [tool.flwr.app.config]"),
        ("local-steps=8", 'an option of `fedauc run` belongs into options="local-steps=8 ..."'),
    ],
)
@pytest.mark.parametrize("command", ["plan", "run", "local", "resume"])
def test_an_unknown_setting_is_refused_by_name(
    command: str, settings: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is started or written."""
    app = tmp_path / "app"
    if command != "local":
        (app / "run").mkdir(parents=True)
        (app / "sites").mkdir()
        (app / "run" / "federation.json").write_text("{}")
        settings_of_app = (
            "[tool.flwr.app.config]",
            "method = 'a'",
            "sites = ''",
            "cycles = 1",
            "on-site-failure = 'stop'",
        )
        (app / "pyproject.toml").write_text("\n".join(settings_of_app))
    place = {"run": (str(app), "hospitals"), "local": ("--out", str(app))}.get(command, (str(app),))
    done = fedauc(capsys, "federation", command, *place, "--run-config", settings)
    assert done.code == 2
    assert done.err.startswith("error: run-config sets ")
    assert done.err.endswith(f"which the app's pyproject.toml does not have; {remedy}\n")
    assert app.exists() == (command != "local")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("cycles=0", "cycles is 0; it must be a whole number of at least 1"),
        ("method='cycp-pairwize'", "unknown method 'cycp-pairwize': did you mean 'cycp-pairwise'?"),
        ("options='learnin-rate=0.1'", "unknown option 'learnin-rate': did you mean 'learning-rate'?"),
        ("deadline=-1.0", "deadline is -1"),
        ("out='second'", "out is 'second'; it must be an absolute path on the server"),
    ],
)
@pytest.mark.parametrize("command", ["run", "local"])
def test_a_value_that_the_server_would_refuse_starts_nothing(
    command: str, settings: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = tmp_path / "app"
    if command == "run":
        config = "\n".join(f"{name} = {json.dumps(value)}" for name, value in read_template_config(app).items())
        app.mkdir()
        (app / "pyproject.toml").write_text(f"[tool.flwr.app.config]\n{config}")
    place = (str(app), "hospitals") if command == "run" else ("--out", str(app))
    done = fedauc(capsys, "federation", command, *place, "--run-config", settings)
    assert done.code == 2
    assert done.err.startswith(f"error: {problem}")
    assert done.err.count("\n") == 1
    assert app.exists() == (command == "run")


def test_settings_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "night.toml").write_text("cycles = 3\n")
    assert read_settings(str(tmp_path / "night.toml")) == {"cycles": 3}
    with pytest.raises(ValueError, match="no such file"):
        read_settings(str(tmp_path / "day.toml"))
