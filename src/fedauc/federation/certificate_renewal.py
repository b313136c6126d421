"""A new certificate for the server, also of a new authority, in three steps between which no site is shut out.

    prepare   `certificates/next/` holds the new files; `ca.pem` lists the old and the new authority, and goes to sites
    switch    the server takes the new certificate; sites trust both, so that they may follow at their own time
    finish    `ca.pem` lists the new authority alone, and goes to sites

Every step can be repeated, as after a crash in the middle of it.
"""

from __future__ import annotations

import contextlib
import datetime
import shutil
import ssl
from pathlib import Path
from typing import Any, NamedTuple

from fedauc.federation.app_folder import OWN_ADDRESS, create_certificates
from fedauc.federation.deploy_folder import DEPLOY_FOLDER
from fedauc.files import write_atomically

EXPIRY_DAYS = 30
"""A certificate that expires sooner is reported."""

CERTIFICATE_FILES = ("ca.pem", "server.pem", "server.key")


class CertificateEntry(NamedTuple):
    """A certificate of a file: whom it is for, who signed it, and its first and last moment."""

    file: str
    subject: str
    issuer: str
    begin: datetime.datetime
    end: datetime.datetime

    def days_left(self, now: datetime.datetime) -> int:
        """Whole days until the certificate expires; negative after that."""
        return (self.end - now).days


def list_certificates(path: Path) -> list[CertificateEntry]:
    """Every certificate of a PEM file, which may hold several authorities or a chain."""
    return [
        CertificateEntry(
            path.name,
            certificate.subject.rfc4514_string(),
            certificate.issuer.rfc4514_string(),
            certificate.not_valid_before_utc,
            certificate.not_valid_after_utc,
        )
        for certificate in _load_certificates(path)
    ]


def prepare_renewal(app: Path) -> str:
    """Let sites trust the next authority, too. Files in `certificates/next/` are taken; without any, they are made.

    Returns what is to be done before the switch.
    """
    folder = app / "certificates"
    following = folder / "next"
    if not following.exists():
        part = folder / ".next.part"
        shutil.rmtree(part, ignore_errors=True)
        create_certificates(part, _read_hosts(folder / "server.pem"))
        part.rename(following)
    authorities = _check_files(app)
    trusted = folder / "ca.pem"
    if set(_load_certificates(following / "ca.pem")) == set(_load_certificates(trusted)):
        return f"sites that have {trusted} need nothing, because it lists the authority; stop the run and use --switch"
    _write_authorities(app, authorities)
    return f"send {trusted} to every site, restart the sites, stop the run, and use --switch"


def switch_certificate(app: Path) -> str:
    """Let the server use the next certificate from its next start on. Returns what is to be done now."""
    folder = app / "certificates"
    following = _need_next(folder)
    if _check_files(app) != _load_certificates(folder / "ca.pem"):
        raise ValueError(f"{folder / 'ca.pem'} does not list the next authority, so no site trusts it: use --prepare")
    # A crash between the two leaves a key without its certificate, which the server refuses; the step is repeated.
    for name in ("server.key", "server.pem"):
        write_atomically(folder / name, (following / name).read_bytes(), is_private=name.endswith(".key"))
    return "restart the server, resume the run, and use --finish when every site is connected"


def finish_renewal(app: Path) -> str:
    """Let sites trust the new authority alone. Returns what is to be done now."""
    folder = app / "certificates"
    following = _need_next(folder)
    if (following / "server.pem").read_bytes() != (folder / "server.pem").read_bytes():
        raise ValueError(f"the server still has its old certificate {folder / 'server.pem'}: use --switch first")
    old_authorities = (folder / "ca.pem").read_bytes()
    _write_authorities(app, _load_certificates(following / "ca.pem"))
    # Renamed first, so that a crash leaves no incomplete folder under the name that the other steps read.
    part = folder / ".next.part"
    shutil.rmtree(part, ignore_errors=True)
    following.rename(part)
    shutil.rmtree(part)
    if (folder / "ca.pem").read_bytes() == old_authorities:
        return "done: the authority is the same, and sites need nothing"
    return f"send {folder / 'ca.pem'} to every site; a site reads it at its next start"


def find_expiring(entries: list[CertificateEntry], now: datetime.datetime) -> list[CertificateEntry]:
    """The certificates that have expired or expire soon, unless the same file holds one of the same kind that lasts.

    During a renewal a file lists an old authority beside a new one.
    """
    lasting = {entry.file for entry in entries if entry.days_left(now) >= EXPIRY_DAYS and entry.begin <= now}
    return [entry for entry in entries if entry.file not in lasting]


def check_own_address(app: Path) -> None:
    """Refuse a server's certificate with which no run would begin, and no error would say why."""
    path = app / "certificates" / "server.pem"
    if OWN_ADDRESS not in _read_hosts(path):
        reason = "to which the server's own processes connect, so that no run would begin"
        raise ValueError(f"{path} is not for {OWN_ADDRESS}, {reason}: renew it with --prepare")


def _need_next(folder: Path) -> Path:
    if not (folder / "next").is_dir():
        raise ValueError(f"{folder / 'next'} does not exist: no renewal is under way; begin one with --prepare")
    return folder / "next"


def _check_files(app: Path) -> list[Any]:
    """The authorities that sites trust during the renewal, if they would accept the next certificate.

    The handshake is done here as a site does it, for every name of the server that the old certificate has.
    """
    folder = app / "certificates" / "next"
    missing = [name for name in CERTIFICATE_FILES if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} has no {missing[0]}; put {', '.join(CERTIFICATE_FILES)} there")
    authorities = _load_certificates(folder.parent / "ca.pem")
    authorities += [known for known in _load_certificates(folder / "ca.pem") if known not in authorities]
    for host in dict.fromkeys([*_read_hosts(folder.parent / "server.pem"), OWN_ADDRESS]):
        for trusted in (authorities, _load_certificates(folder / "ca.pem")):
            if problem := _find_handshake_problem(folder, _encode(trusted).decode(), host):
                raise ValueError(f"a site would refuse {folder / 'server.pem'} ({problem}); get another certificate")
    return authorities


def _find_handshake_problem(folder: Path, authorities: str, host: str) -> str:
    """Why a client that trusts these authorities refuses the server's certificate in a folder; empty if it does not."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # An empty password, because a key with one would be asked for at the terminal of the server.
        context.load_cert_chain(folder / "server.pem", folder / "server.key", password="")
        trusting = ssl.create_default_context(cadata=authorities)
        client = trusting.wrap_bio(to_client, to_server, server_hostname=host)
        server = context.wrap_bio(to_server, to_client, server_side=True)
        # The client is asked last: it is the one that refuses.
        for side in (client, server, client, server, client):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except (ssl.SSLError, ValueError) as error:
        return str(error)
    return ""


def _load_certificates(path: Path) -> list[Any]:
    from cryptography import x509

    try:
        return list(x509.load_pem_x509_certificates(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); give certificates in PEM format") from error


def _read_hosts(path: Path) -> list[str]:
    """The names and addresses of a server's certificate, its common name first."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    certificate = _load_certificates(path)[0]
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise ValueError(f"{path} names no host; get a certificate with subject alternative names") from None
    hosts = [str(member.value) for member in names]
    common = [str(member.value) for member in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    return sorted(hosts, key=lambda host: host not in common)


def read_server_host(app: Path) -> str:
    """The name or address of the server in its certificate, which sites connect to."""
    return _read_hosts(app / "certificates" / "server.pem")[0]


def _write_authorities(app: Path, certificates: list[Any]) -> None:
    """Write the authorities that sites trust, and the copies that go to the sites."""
    pem = _encode(certificates)
    copies = (app / DEPLOY_FOLDER / "sites").glob("*/config/ca.pem")
    for path in (app / "certificates" / "ca.pem", *sorted(copies)):
        write_atomically(path, pem)


def _encode(certificates: list[Any]) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in certificates)
