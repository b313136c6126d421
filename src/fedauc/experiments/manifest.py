"""The manifest of a run folder: the SHA-256 of every file, and an Ed25519 signature of it.

`manifest.json` is written when a run is done. `manifest.sig` is the signature of its bytes, which `fedauc sign` adds.
The secret of a private run's noise is not listed, because it must not be shared.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedauc.files import write_atomically

MANIFEST_FILE, SIGNATURE_FILE = "manifest.json", "manifest.sig"

UNLISTED = (MANIFEST_FILE, SIGNATURE_FILE, "noise.key")

MANIFEST_FORMAT = 1

SIGNED_PREFIX = b"fedauc-manifest-1\n"
"""Comes before the signed bytes, so that the signature of another kind of document is never one of a manifest."""


class FileDifferences(NamedTuple):
    """How a folder differs from its manifest: names of files that are changed, missing, or not listed."""

    changed: tuple[str, ...]
    missing: tuple[str, ...]
    unlisted: tuple[str, ...]


def list_folder_files(folder: Path) -> dict[str, Path]:
    """The files of a folder that belong into its manifest, by their relative names; hidden ones are left out."""
    files = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in relative.parts)
        if not is_hidden and relative.as_posix() not in UNLISTED and (path.is_file() or path.is_symlink()):
            files[relative.as_posix()] = path
    return files


def write_manifest(folder: Path, coming: Mapping[str, bytes] | None = None) -> None:
    """List all files of a folder, and those that are about to be written, with the hashes of their bytes."""
    entries = {name: _hash_file(path) for name, path in list_folder_files(folder).items()}
    entries |= {name: hashlib.sha256(content).hexdigest() for name, content in (coming or {}).items()}
    _write_entries(folder, entries)


def update_manifest(folder: Path, names: Iterable[str]) -> None:
    """Give files that a command has changed their new hashes; a folder without a manifest gets none."""
    if not (folder / MANIFEST_FILE).is_file():
        return
    present, entries = list_folder_files(folder), read_manifest(folder)
    changed = entries | {name: _hash_file(present[name]) for name in names}
    if changed == entries:
        return
    _write_entries(folder, changed)
    if (folder / SIGNATURE_FILE).is_file():
        logging.getLogger("fedauc").warning("%s has changed since it was signed; sign it again", folder)


def check_manifest_entries(folder: Path, names: Iterable[str]) -> None:
    """Refuse to change files that are not those of the manifest any more."""
    if not (folder / MANIFEST_FILE).is_file():
        return
    entries, present = read_manifest(folder), list_folder_files(folder)
    for name in names:
        if name in entries and (name not in present or _hash_file(present[name]) != entries[name]):
            raise ValueError(
                f"{folder / name} is not the file that the run wrote; put it back, or see `fedauc verify {folder}`"
            )


def read_manifest(folder: Path) -> dict[str, str]:
    """The hash of every listed file; a damaged manifest is a `ValueError`."""
    path = folder / MANIFEST_FILE
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}; copy it again from where the run was trained") from error
    files = document.get("files") if isinstance(document, dict) else None
    if not isinstance(files, dict) or not all(isinstance(value, str) for value in files.values()):
        raise ValueError(f"{path} is damaged: it lists no files; copy it again from where the run was trained")
    if document.get("format") != MANIFEST_FORMAT:
        written = document.get("format")
        raise ValueError(f"{path} has format {written}; this version reads format {MANIFEST_FORMAT}: upgrade fedauc")
    return dict(files)


def compare_with_manifest(folder: Path) -> FileDifferences:
    """Read every file, and say which ones are not those of the manifest."""
    entries, present = read_manifest(folder), list_folder_files(folder)
    changed = tuple(name for name in entries if name in present and _hash_file(present[name]) != entries[name])
    missing = tuple(name for name in entries if name not in present)
    return FileDifferences(changed, missing, tuple(name for name in present if name not in entries))


def create_signing_key(path: Path) -> None:
    """Write a new Ed25519 key, readable by its owner alone, and beside it the public key as `.pub`."""
    serialization, ed25519 = import_cryptography()
    if path.exists():
        raise ValueError(f"{path} exists already; leave --create-key out to sign with it, or choose another file")
    key = ed25519.Ed25519PrivateKey.generate()
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    write_atomically(path, secret, is_private=True)
    write_atomically(path.with_name(f"{path.name}.pub"), public)


def sign_folder(folder: Path, key_file: Path) -> str:
    """List the files of a folder as they are now, and sign the list; returns the fingerprint of the public key."""
    serialization, ed25519 = import_cryptography()
    key = _read_key(key_file, lambda content: serialization.load_pem_private_key(content, None))
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ValueError(f"{key_file} is no Ed25519 private key; make one with --create-key")
    write_manifest(folder)
    public = key.public_key().public_bytes_raw()
    document = {
        "format": MANIFEST_FORMAT,
        "algorithm": "ed25519",
        "public_key": public.hex(),
        "signature": key.sign(SIGNED_PREFIX + (folder / MANIFEST_FILE).read_bytes()).hex(),
    }
    write_atomically(folder / SIGNATURE_FILE, json.dumps(document, indent=2).encode() + b"\n")
    return describe_key(public)


def check_signature(folder: Path, public_key_file: Path | None) -> str:
    """The fingerprint of the key that has signed the manifest; a `ValueError` says what is wrong with the signature.

    Without a file of a public key, the signature's own key is used: that shows that nothing was changed afterwards,
    but not who has signed.
    """
    serialization, ed25519 = import_cryptography()
    from cryptography.exceptions import InvalidSignature

    path = folder / SIGNATURE_FILE
    if not path.is_file():
        raise ValueError(f"{folder} is not signed: it has no {SIGNATURE_FILE}")
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        public, signature = bytes.fromhex(document["public_key"]), bytes.fromhex(document["signature"])
        key = ed25519.Ed25519PublicKey.from_public_bytes(public)
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no signature ({type(error).__name__})") from error
    if public_key_file is not None:
        key = _read_key(public_key_file, serialization.load_pem_public_key)
        if not isinstance(key, ed25519.Ed25519PublicKey):
            raise ValueError(f"{public_key_file} is no Ed25519 public key")
        if key.public_bytes_raw() != public:
            expected = describe_key(key.public_bytes_raw())
            raise ValueError(f"{path} is by the key {describe_key(public)}, not by {expected} of {public_key_file}")
    try:
        key.verify(signature, SIGNED_PREFIX + (folder / MANIFEST_FILE).read_bytes())
    except InvalidSignature:
        raise ValueError(f"{folder / MANIFEST_FILE} is not what was signed") from None
    return describe_key(public)


def describe_key(public: bytes) -> str:
    """A short fingerprint of a public key, for people to compare.

    >>> describe_key(bytes(32))
    'SHA256:66687aadf862bd77'
    """
    return f"SHA256:{hashlib.sha256(public).hexdigest()[:16]}"


def _read_key(path: Path, read: Any) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a PEM file, or make a key with `fedauc sign --create-key`")
    try:
        return read(path.read_bytes())
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no PEM file with an unencrypted key; give one that has it") from error


def import_cryptography() -> tuple[Any, Any]:
    """The modules for keys and signatures; where they are missing, a `ValueError` says how to install them."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ValueError("signatures need cryptography: run pip install cryptography") from None
    return serialization, ed25519


def _write_entries(folder: Path, entries: Mapping[str, str]) -> None:
    document = {"format": MANIFEST_FORMAT, "files": dict(sorted(entries.items()))}
    write_atomically(folder / MANIFEST_FILE, json.dumps(document, indent=2).encode() + b"\n")


def _hash_file(path: Path) -> str:
    """The SHA-256 of a file; a link has that of its target's name, so that it is never taken for a file."""
    if path.is_symlink():
        return f"link to {path.readlink()}"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
