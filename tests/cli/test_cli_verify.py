"""`fedauc verify` finds every change of a run folder, and `fedauc sign` says who wrote it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from cli_helpers import Outcome, fedauc
from fedauc.experiments.manifest import MANIFEST_FILE, SIGNATURE_FILE, list_folder_files, write_manifest


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fedauc.data.datasets.synthetic import Synthetic
    from fedauc.experiments.config import Config
    from fedauc.experiments.recipe import Recipe
    from fedauc.experiments.runner import Run

    out = tmp_path_factory.mktemp("runs") / "run"
    recipe = Recipe.of("cycp-pairwise", cycles=2, local_steps=2)
    Run.create(Config(recipe=recipe, data=Synthetic(clients=6)), out).train_to_end()
    return out


@pytest.fixture
def run_copy(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def sign_run(capsys: pytest.CaptureFixture[str], folder: Path, key: Path) -> None:
    done = fedauc(capsys, "sign", str(folder), "--key", str(key), "--create-key")
    assert done.code == 0, done.err
    assert key.stat().st_mode & 0o777 == 0o600


def verify_run(capsys: pytest.CaptureFixture[str], folder: Path, key: Path | None = None) -> Outcome:
    words = () if key is None else ("--public-key", f"{key}.pub")
    return fedauc(capsys, "verify", str(folder), *words)


def test_an_untouched_run_passes_every_check(capsys: pytest.CaptureFixture[str], run_copy: Path) -> None:
    done = verify_run(capsys, run_copy)
    assert done.code == 0
    assert "files have the hashes" in done.out
    rounds, records = (
        1 + json.loads((run_copy / "result.json").read_text())["final"]["round"],
        run_copy / "records.jsonl",
    )
    count = len(records.read_text().splitlines())
    assert f"result.json agrees with the last of {count} records (after {rounds} rounds)" in done.out
    assert "values of result.json follow" in done.out
    assert "the stored model gives the 600 test rows the scores" in " ".join(done.out.split())


def test_every_changed_removed_or_added_file_of_a_signed_run_is_named(
    capsys: pytest.CaptureFixture[str], run_copy: Path, tmp_path: Path
) -> None:
    key = tmp_path / "signing.pem"
    sign_run(capsys, run_copy, key)
    assert verify_run(capsys, run_copy, key).code == 0
    files = list_folder_files(run_copy)
    assert {"config.json", "records.jsonl", "model.pt", "scores.npz", "result.json"} < set(files)
    for name, path in files.items():
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        changed = verify_run(capsys, run_copy, key)
        if changed.code != 2:
            # A configuration that cannot be read at all is an error of one line.
            assert changed.code == 1
            assert f"{name} is not the file" in changed.out
        path.write_bytes(content)
        if name not in ("config.json", "result.json"):
            path.unlink()
            removed = verify_run(capsys, run_copy, key)
            assert removed.code == 1
            assert f"{name} is missing" in removed.out
            if name == "records.jsonl":
                assert "not checked the records, because records.jsonl is missing" in removed.out
                assert f"{run_copy}: 1 check failed\n" in removed.out
            path.write_bytes(content)
    (run_copy / "extra.json").write_text("{}")
    added = verify_run(capsys, run_copy, key)
    assert added.code == 1
    assert "extra.json, which manifest.json does not list" in added.out


def test_a_manifest_written_anew_does_not_pass_for_the_signed_one(
    capsys: pytest.CaptureFixture[str], run_copy: Path, tmp_path: Path
) -> None:
    key, forger = tmp_path / "signing.pem", tmp_path / "forger.pem"
    sign_run(capsys, run_copy, key)
    (run_copy / "timing.jsonl").write_text('{"round": 0, "seconds": 1.0}\n')
    write_manifest(run_copy)
    done = verify_run(capsys, run_copy, key)
    assert done.code == 1
    assert "manifest.json is not what was signed" in done.out
    sign_run(capsys, run_copy, forger)
    done = verify_run(capsys, run_copy, key)
    assert done.code == 1
    assert "is by the key SHA256:" in done.out
    (run_copy / SIGNATURE_FILE).unlink()
    done = verify_run(capsys, run_copy, key)
    assert done.code == 1
    assert "is not signed" in done.out


def test_a_forged_result_is_found_without_any_hash(capsys: pytest.CaptureFixture[str], run_copy: Path) -> None:
    """Records and result agree with each other, but not with the scores."""
    (run_copy / MANIFEST_FILE).unlink()
    for name in ("result.json", "records.jsonl"):
        path = run_copy / name
        lines = [json.loads(line) for line in path.read_text().splitlines()] if name == "records.jsonl" else []
        if lines:
            lines[-1]["auc"] = 0.999
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        else:
            result = json.loads(path.read_text())
            result["final"]["auc"] = 0.999
            path.write_text(json.dumps(result))
    done = verify_run(capsys, run_copy)
    assert done.code == 1
    assert "auc is 0.999 in result.json, but" in done.out
    # A file that federations have does not switch the checks of a simulation off.
    (run_copy / "federation.json").write_text("{}")
    assert verify_run(capsys, run_copy).code == 1


def test_forged_scores_are_not_those_of_the_model(capsys: pytest.CaptureFixture[str], run_copy: Path) -> None:
    with np.load(run_copy / "scores.npz") as stored:
        arrays = {name: stored[name] for name in stored.files}
    arrays["scores"] = arrays["scores"] + arrays["labels"]
    np.savez(run_copy / "scores.npz", **arrays)
    done = verify_run(capsys, run_copy)
    assert done.code == 1
    assert "the stored model gives the test rows other scores than scores.npz has" in done.out


def test_a_new_threshold_keeps_the_manifest_and_asks_for_a_new_signature(
    capsys: pytest.CaptureFixture[str], run_copy: Path, tmp_path: Path
) -> None:
    assert fedauc(capsys, "threshold", str(run_copy), "--fpr", "0.2").code == 0
    assert verify_run(capsys, run_copy).code == 0
    sign_run(capsys, run_copy, tmp_path / "signing.pem")
    done = fedauc(capsys, "threshold", str(run_copy), "--fpr", "0.1")
    assert "has changed since it was signed" in " ".join(done.err.split())
    assert verify_run(capsys, run_copy).code == 1
    (run_copy / "MODEL_CARD.md").write_text("forged")
    refused = fedauc(capsys, "threshold", str(run_copy), "--fpr", "0.2")
    assert refused.code == 2
    assert "is not the file that the run wrote" in refused.err


def test_what_cannot_be_verified_or_signed_is_one_line(capsys: pytest.CaptureFixture[str], run_copy: Path) -> None:
    for words in (
        ("verify", str(run_copy / "nowhere")),
        ("sign", str(run_copy / "nowhere"), "--key", "no.pem"),
        ("sign", str(run_copy), "--key", str(run_copy / "no.pem")),
        ("sign", str(run_copy), "--key", str(run_copy / "model.pt")),
    ):
        done = fedauc(capsys, *words)
        assert done.code == 2, words
        assert len(done.err.strip().splitlines()) == 1


def test_a_signed_run_without_the_package_for_signatures_says_what_to_install(
    capsys: pytest.CaptureFixture[str], run_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign_run(capsys, run_copy, tmp_path / "key.pem")
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    # An entry of None makes Python say that there is no such module.
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for key in (None, tmp_path / "key.pem"):
        done = verify_run(capsys, run_copy, key)
        assert (done.code, done.out) == (2, "")
        assert done.err == "error: signatures need cryptography: run pip install cryptography\n"


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_folder_of_a_federation_is_left_to_the_commands_that_read_it(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app, model = tmp_path / "app", tmp_path / "model"
    for file in (app / "run" / "federation.json", model / "delivery.json", model / "scorer.json"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    for folder, reader in (
        (app, f"`fedauc federation show {app}` shows it, and `fedauc verify {app}/run` verifies it"),
        (app / "run", f"`fedauc federation show {app}/run`"),
        (model, "`fedauc federation report STATE` verifies it"),
    ):
        done = fedauc(capsys, command, str(folder))
        assert (done.code, done.out) == (2, "")
        assert reader in done.err
