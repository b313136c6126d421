"""The operator's commands at a site: a dry run that names what is wrong, approval, audit and report."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from cli_helpers import fedauc
from fedauc.federation.app_folder import create_certificates, create_key_pair
from fedauc.federation.audit_log import AuditLog
from fedauc.federation.site_check import SiteSetup, check_site
from federation.hospital_tables import SCHEMA, make_hospital


def write_setup(folder: Path) -> SiteSetup:
    """A site whose parts are all right."""
    make_hospital(1).to_csv(folder / "rows.csv", index=False)
    (folder / "schema.toml").write_text(SCHEMA.to_toml())
    (folder / "policy.toml").write_text("[rows]\nminimum_per_class = 5\n")
    create_certificates(folder / "certificates", ["localhost"])
    create_key_pair(folder / "key")
    return SiteSetup(
        folder / "rows.csv",
        folder / "state",
        folder / "schema.toml",
        folder / "policy.toml",
        folder / "certificates" / "ca.pem",
        folder / "key",
    )


def test_a_site_that_is_ready_trains_a_test_round_and_leaves_no_state(tmp_path: Path) -> None:
    setup = write_setup(tmp_path)
    results = {result.part: result for result in check_site(setup)}
    # Flower has an environment of its own, so that its version may be missing here.
    failed = {part for part, result in results.items() if not result.is_ok}
    assert failed <= {"versions"}
    assert results["test round"].text.startswith("prepared and trained in")
    assert "held-out AUC" in results["test round"].text
    assert "120" not in results["rows"].text
    assert not setup.state.exists()


def test_a_site_with_few_held_out_rows_is_told_that_it_is_not_evaluated(tmp_path: Path) -> None:
    setup = write_setup(tmp_path)
    train, held_out = [result.text for result in check_site(setup) if result.part == "rows"]
    assert train.endswith("negatives to train on")
    positives = int(held_out.split()[0])
    (tmp_path / "policy.toml").write_text(f"[rows]\nminimum_per_class = {positives + 1}\n")
    results = check_site(setup)
    assert {result.part for result in results if not result.is_ok} <= {"versions"}, "it trains nevertheless"
    texts = [result.text for result in results if result.part == "rows"]
    bound = f"; the policy asks for {positives + 1} of a class"
    assert texts == [train, f"{held_out}{bound}, so that no scores are sent and the site is not evaluated"]
    (tmp_path / "policy.toml").write_text("[rows]\nminimum_per_class = 10000\n")
    assert "rows" in {result.part for result in check_site(setup) if not result.is_ok}


def test_a_site_with_one_class_is_told_that_it_gets_no_model(tmp_path: Path) -> None:
    setup = write_setup(tmp_path)
    make_hospital(1).assign(died="no").to_csv(setup.data, index=False)
    results = check_site(setup)
    assert {result.part for result in results if not result.is_ok} <= {"versions"}
    (text,) = [result.text for result in results if result.part == "test round"]
    assert text.startswith("not tried, because all rows are of one class; the site can train with others, but gets no")


def test_every_part_that_is_wrong_is_named(tmp_path: Path) -> None:
    setup = write_setup(tmp_path)
    make_hospital(1).rename(columns={"age": "Age"}).assign(died="maybe").to_csv(setup.data, index=False)
    (tmp_path / "policy.toml").write_text("[runs]\napproval = 3")
    (tmp_path / "key").chmod(0o644)
    (tmp_path / "certificates" / "ca.pem").write_text("nothing")
    (tmp_path / "schema.toml").write_text(SCHEMA.to_toml().replace('fedauc = "', 'fedauc = "9.'))
    results = {result.part: result for result in check_site(setup) if not result.is_ok}
    assert set(results) == {"schema", "policy", "versions", "certificate", "key"}
    assert results["schema"].text == "column 'age' is missing, and there is a column 'Age': rename it"
    assert "chmod 600" in results["key"].text


def test_a_server_needs_a_certificate_and_a_damaged_log_is_found(tmp_path: Path) -> None:
    """Without either, `check` would say that a site is ready which cannot connect, or answers nothing."""
    setup = write_setup(tmp_path)._replace(certificate=None, server="localhost:1")
    AuditLog(setup.state).append({"event": "a", "rule": "operator"})
    AuditLog(setup.state).append({"event": "b", "rule": "operator"})
    log = setup.state / "audit.jsonl"
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    results = {result.part: result for result in check_site(setup)}
    assert "is not asked without --certificate" in results["server"].text
    assert "the log ends after line 1, but its head counts 2" in results["audit log"].text
    assert not results["server"].is_ok
    assert not results["audit log"].is_ok


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    """Flower takes keys on elliptic curves of NIST alone."""
    setup = write_setup(tmp_path)
    key = ed25519.Ed25519PrivateKey.generate()
    forms = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    (tmp_path / "key").write_bytes(key.private_bytes(*forms))
    results = {result.part: result for result in check_site(setup)}
    assert not results["key"].is_ok
    assert "is another kind of key, which Flower refuses" in results["key"].text


def test_a_server_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    setup = write_setup(tmp_path)._replace(server="127.0.0.1:9")
    (result,) = [result for result in check_site(setup) if result.part == "server"]
    assert not result.is_ok
    assert "cannot be reached" in result.text


def test_the_command_ends_with_an_error_if_a_check_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup = write_setup(tmp_path)
    make_hospital(1).assign(age=500).to_csv(setup.data, index=False)
    words = ["--data", str(setup.data), "--state", str(setup.state), "--schema", str(setup.schema)]
    done = fedauc(capsys, "federation", "check", *words)
    assert done.code == 2
    assert "FAIL  schema      column 'age' holds values outside 0 to 120 years" in done.out
    assert "checks failed (schema" in done.err
    assert max(map(len, done.out.splitlines())) <= 80


def test_operators_commands_on_an_empty_state_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fedauc(capsys, "federation", "approve", str(tmp_path)).out == "no server has proposed a plan yet\n"
    assert "has no report" in fedauc(capsys, "federation", "report", str(tmp_path)).err
    done = fedauc(capsys, "federation", "audit", str(tmp_path))
    assert (done.code, "has no audit log (audit.jsonl); give the site's state folder" in done.err) == (2, True)
    assert "is no folder" in fedauc(capsys, "federation", "audit", str(tmp_path / "none")).err
    assert fedauc(capsys, "federation", "policy", str(tmp_path / "policy.toml")).code == 0
    assert fedauc(capsys, "federation", "policy", str(tmp_path / "policy.toml")).code == 2
