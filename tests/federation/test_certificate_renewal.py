"""The server's certificate is renewed in three steps; what would shut sites out is refused."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cli_helpers import fedauc
from fedauc.federation.app_folder import create_certificates, create_key_pair
from fedauc.federation.certificate_renewal import (
    find_expiring,
    finish_renewal,
    list_certificates,
    prepare_renewal,
    switch_certificate,
)
from fedauc.federation.key_rotation import replace_site_key
from fedauc.federation.site_check import SiteSetup, check_site

HOSTS = ["fed.example.org", "10.0.0.1"]


def make_app(folder: Path) -> Path:
    """An app's certificates and a site's copy of the authority's."""
    create_certificates(folder / "certificates", HOSTS)
    (folder / "sites.toml").write_text('[north]\ngroup = "day"\n')
    (folder / "deploy" / "sites" / "north" / "config").mkdir(parents=True)
    (folder / "deploy" / "sites" / "north" / "config" / "ca.pem").write_bytes(read(folder, "ca.pem"))
    return folder


def read(folder: Path, name: str) -> bytes:
    return (folder / "certificates" / name).read_bytes()


def sign_certificate(
    folder: Path,
    authority_key: ec.EllipticCurvePrivateKey,
    hosts: list[str],
    days: int = 365,
    has_own_address: bool = True,
) -> None:
    """A certificate of an authority whose key goes on from one renewal to the next, as that of a hospital does."""
    now, key = datetime.datetime.now(datetime.UTC), ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hospitals' authority")])

    def build(subject: x509.Name, public_key: Any, extension: x509.ExtensionType) -> bytes:
        builder = x509.CertificateBuilder(issuer, subject, public_key, x509.random_serial_number())
        builder = builder.not_valid_before(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
        builder = builder.not_valid_after(now + datetime.timedelta(days=days)).add_extension(extension, critical=False)
        return builder.sign(authority_key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)

    folder.mkdir(parents=True, exist_ok=True)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    own = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))] if has_own_address else []
    names = x509.SubjectAlternativeName([*(x509.DNSName(host) for host in hosts), *own])
    if not (folder / "ca.pem").exists():
        (folder / "ca.pem").write_bytes(build(issuer, authority_key.public_key(), x509.BasicConstraints(True, None)))
    (folder / "server.pem").write_bytes(build(subject, key.public_key(), names))
    forms = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server.key").write_bytes(key.private_bytes(*forms))


def test_a_new_authority_is_trusted_before_it_is_used_and_alone_at_the_end(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    copy = app / "deploy" / "sites" / "north" / "config" / "ca.pem"
    old_authority, old_server, old_key = (read(app, name) for name in ("ca.pem", "server.pem", "server.key"))
    assert "send" in prepare_renewal(app)
    following = {name: read(app, f"next/{name}") for name in ("ca.pem", "server.pem", "server.key")}
    assert read(app, "ca.pem") == copy.read_bytes() == old_authority + following["ca.pem"]
    assert (read(app, "server.pem"), read(app, "server.key")) == (old_server, old_key)
    # A step can be repeated, as after a crash.
    prepare_renewal(app)
    assert read(app, "ca.pem") == old_authority + following["ca.pem"]
    assert read(app, "next/server.pem") == following["server.pem"]
    for _ in range(2):
        switch_certificate(app)
        assert (read(app, "server.pem"), read(app, "server.key")) == (following["server.pem"], following["server.key"])
    assert (app / "certificates" / "server.key").stat().st_mode & 0o077 == 0
    # Both files belong together: ssl loads a certificate only with its key.
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
        app / "certificates" / "server.pem", app / "certificates" / "server.key"
    )
    assert "send" in finish_renewal(app)
    assert read(app, "ca.pem") == copy.read_bytes() == following["ca.pem"]
    assert not (app / "certificates" / "next").exists()


def test_the_certificate_of_the_same_authority_changes_nothing_at_the_sites(tmp_path: Path) -> None:
    authority = ec.generate_private_key(ec.SECP384R1())
    app = tmp_path
    sign_certificate(app / "certificates", authority, HOSTS[:1], days=20)
    before = read(app, "ca.pem")
    (app / "certificates" / "next").mkdir()
    (app / "certificates" / "next" / "ca.pem").write_bytes(before)
    sign_certificate(app / "certificates" / "next", authority, HOSTS[:1])
    assert "need nothing, because it lists the authority" in prepare_renewal(app)
    switch_certificate(app)
    assert "sites need nothing" in finish_renewal(app)
    assert read(app, "ca.pem") == before
    assert (
        list_certificates(app / "certificates" / "server.pem")[0].days_left(datetime.datetime.now(datetime.UTC)) > 300
    )


def test_a_next_authority_beside_the_present_one_goes_to_the_sites(tmp_path: Path) -> None:
    """Whoever runs the authority may list the old one beside the new one already."""
    app, present = make_app(tmp_path), read(tmp_path, "ca.pem")
    create_certificates(app / "certificates" / "next", HOSTS)
    both = present + read(app, "next/ca.pem")
    (app / "certificates" / "next" / "ca.pem").write_bytes(both)
    assert "send" in prepare_renewal(app)
    assert read(app, "ca.pem") == both
    switch_certificate(app)
    finish_renewal(app)
    assert read(app, "ca.pem") == both


def test_a_finish_that_was_cut_off_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(tmp_path)
    prepare_renewal(app)
    switch_certificate(app)
    following = read(app, "next/ca.pem")

    def fail(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(KeyboardInterrupt):
            finish_renewal(app)
    finish_renewal(app)
    assert read(app, "ca.pem") == following
    assert not (app / "certificates" / "next").exists()


def test_steps_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    with pytest.raises(ValueError, match="no renewal is under way; begin one with --prepare"):
        switch_certificate(app)
    prepare_renewal(app)
    with pytest.raises(ValueError, match=r"still has its old certificate .*: use --switch first"):
        finish_renewal(app)
    create_certificates(tmp_path / "third", HOSTS)
    for name in ("ca.pem", "server.pem", "server.key"):
        (app / "certificates" / "next" / name).write_bytes((tmp_path / "third" / name).read_bytes())
    with pytest.raises(ValueError, match="does not list the next authority, so no site trusts it: use --prepare"):
        switch_certificate(app)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("host", "Hostname mismatch, certificate is not valid for .fed.example.org"),
        ("key", "KEY_VALUES_MISMATCH"),
        ("authority", "unable to get local issuer certificate"),
        ("expired", "certificate has expired"),
        ("missing", "has no server.key; put ca.pem, server.pem, server.key there"),
        ("text", "ca.pem cannot be read"),
        ("name", "certificate signature failure"),
    ],
)
def test_next_files_that_would_shut_sites_out_are_refused(tmp_path: Path, damage: str, message: str) -> None:
    app, following = make_app(tmp_path), tmp_path / "certificates" / "next"
    authority = ec.generate_private_key(ec.SECP384R1())
    hosts = ["elsewhere.example.org"] if damage == "host" else HOSTS[:1]
    create_certificates(tmp_path / "certificates2", HOSTS[:1])
    for name in ("ca.pem", "server.pem", "server.key"):
        (app / "certificates" / name).write_bytes((tmp_path / "certificates2" / name).read_bytes())
    if damage == "name":
        # Another authority of the same name, without identifiers of their keys: TLS would take the wrong one.
        for part in ("ca.pem", "server.pem", "server.key"):
            (app / "certificates" / part).unlink()
        sign_certificate(app / "certificates", ec.generate_private_key(ec.SECP384R1()), hosts)
    sign_certificate(following, authority, hosts, days=-1 if damage == "expired" else 365)
    if damage == "key":
        (following / "server.key").write_bytes(read(app, "server.key"))
    elif damage == "authority":
        (following / "ca.pem").write_bytes(read(app, "ca.pem"))
    elif damage == "missing":
        (following / "server.key").unlink()
    elif damage == "text":
        (following / "ca.pem").write_text("nothing")
    before = read(app, "ca.pem")
    with pytest.raises(ValueError, match=message):
        prepare_renewal(app)
    assert read(app, "ca.pem") == before


def test_the_command_says_when_certificates_expire(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = make_app(tmp_path)
    done = fedauc(capsys, "federation", "certificates", str(app))
    assert done.code == 0
    assert "CN=fed.example.org, valid until" in done.out
    sign_certificate(app / "certificates", ec.generate_private_key(ec.SECP384R1()), HOSTS[:1], days=20)
    done = fedauc(capsys, "federation", "certificates", str(app))
    assert done.code == 2
    assert "server.pem has 19 days left, and 30 are needed: begin a renewal with --prepare" in done.err
    (app / "certificates" / "ca.pem").unlink()
    sign_certificate(app / "certificates", ec.generate_private_key(ec.SECP384R1()), HOSTS[:1], has_own_address=False)
    done = fedauc(capsys, "federation", "certificates", str(app))
    assert (done.code, "is not for 127.0.0.1, to which the server's own processes connect" in done.err) == (2, True)
    assert fedauc(capsys, "federation", "certificates", str(app), "--prepare", "--switch").code == 2
    assert fedauc(capsys, "federation", "certificates", str(tmp_path / "none")).code == 2


def test_an_old_authority_beside_a_new_one_does_not_fail_the_checks(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    expiring = tmp_path / "expiring"
    sign_certificate(expiring, ec.generate_private_key(ec.SECP384R1()), HOSTS[:1], days=5)
    bundle = app / "certificates" / "ca.pem"
    setup = SiteSetup(tmp_path / "rows.csv", tmp_path / "state", certificate=bundle)

    def check() -> tuple[bool, str]:
        (result,) = (result for result in check_site(setup) if result.part == "certificate")
        return result.is_ok, result.text

    lasting = bundle.read_bytes()
    bundle.write_bytes((expiring / "ca.pem").read_bytes() + lasting)
    assert not find_expiring(list_certificates(bundle), datetime.datetime.now(datetime.UTC))
    assert check() == (True, check()[1])
    assert "it lists 2 authorities" in check()[1]
    bundle.write_bytes((expiring / "ca.pem").read_bytes())
    assert find_expiring(list_certificates(bundle), datetime.datetime.now(datetime.UTC))
    assert check()[0] is False


def test_a_key_is_replaced_for_a_known_site_with_a_key_of_its_own(tmp_path: Path) -> None:
    """What is refused before anything is done; the whole command is tried by `make test-federation`."""
    lines = {name: create_key_pair(tmp_path / name) for name in ("north", "south", "new")}
    # A comment after the key is no part of it.
    table = "".join(f'[{name}]\ngroup = "day"\nkey = "{lines[name]} {name}"\n' for name in ("north", "south"))
    (tmp_path / "sites.toml").write_text(table)

    def run_flwr(*arguments: str) -> str:
        raise AssertionError(f"nothing must be asked of the server: {arguments}")

    for site, key, message in (
        ("west", "new.pub", "has no site 'west'; it has north, south"),
        ("north", "south.pub", "is the key of site 'south'; every site needs a key of its own"),
        ("north", "new", "new is no public key"),
    ):
        with pytest.raises(ValueError, match=message):
            replace_site_key(tmp_path, site, tmp_path / key, "federation", run_flwr)
    assert (tmp_path / "sites.toml").read_text() == table
