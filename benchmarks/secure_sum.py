"""What hiding single uploads costs: a plain sum, the secure sum of fedauc, and CKKS encryption by TenSEAL, in one run.

    python benchmarks/secure_sum.py
    python benchmarks/secure_sum.py --clients 10 --parameters 10000

TenSEAL lives in an environment of its own, and its rows are left out where this is missing:

    python -m venv benchmarks/.venvs/tenseal
    benchmarks/.venvs/tenseal/bin/pip install -r benchmarks/peers/tenseal.txt

All sums are computed in this machine's memory: no message travels, and nothing is trained. See `ABOUT` for what is in
the file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent

CLIP = 1.0
"""Largest norm of a client's vector."""

ENCRYPTED_CLIENTS = 2
"""Clients whose vectors TenSEAL encrypts; the time of the server's additions is multiplied up to all clients."""

SLOTS, MODULUS_BITS, PRECISION_BITS = 4096, (60, 40, 60), 40
"""Numbers per CKKS ciphertext (half the polynomial's degree), its coefficient moduli, and the bits of its scale."""

ABOUT = {
    "client_s": "median over clients: making the upload and, in the secure sum, answering exchange 2 as well",
    "server_s": "adding all uploads and, in the secure sum, recovering and subtracting the masks",
    "decrypt_s": "tenseal only: decrypting the sum, which a holder of the secret key does and the server cannot",
    "bytes_up": "sent by a client in a round, the same for all clients",
    "bytes_down": "received by a client in a round beyond the model: session and packets, or the sum to decrypt",
    "error": f"largest absolute error of a number of the sum; for tenseal, of a sum of {ENCRYPTED_CLIENTS} clients",
    "secure": "no client is absent",
    "secure, absent": "one client in ten is absent from exchange 1, and as many others from exchange 2",
    "tenseal": f"CKKS, {SLOTS} numbers per ciphertext; {ENCRYPTED_CLIENTS} clients encrypt, and the server's time for "
    "them is multiplied up to all clients",
}

Row = dict[str, Any]


# ---------------------------------------------------------------------------------------------- inside a case's process


def measure_plain(clients: int, parameters: int) -> Row:
    """Clients send float32 numbers, the server adds them."""
    import numpy as np

    vectors = _draw_vectors(clients, parameters)
    sent, seconds = _time_all(lambda vector: vector.tobytes(), vectors)
    start = time.perf_counter()
    total = np.zeros(parameters, np.float32)
    for message in sent:
        total += np.frombuffer(message, np.float32)
    server = time.perf_counter() - start
    return _make_row(median(seconds), server, (len(sent[0]), 0), _largest_error(total, vectors))


def measure_secure(clients: int, parameters: int, absent: int = 0) -> Row:
    """The secure sum; `absent` clients do not upload, and as many others do not answer exchange 2."""
    import torch

    from fedauc.privacy.fixed_point import FixedPoint, choose_scale
    from fedauc.privacy.secure_sum import (
        SecureSumServer,
        SecureSumSession,
        SiteRecord,
        choose_threshold,
        create_session_id,
        mask_vector,
        reveal_shares,
    )

    code = FixedPoint(choose_scale(CLIP, clients), clients)
    records = [SiteRecord.create() for _ in range(clients)]
    session = SecureSumSession(
        session_id=create_session_id(0),
        members=tuple(range(clients)),
        public_keys=tuple(record.public_key for record in records),
        threshold=choose_threshold(clients),
        length=parameters,
    )
    vectors = _draw_vectors(clients, parameters)[absent:]
    survivors = range(absent, clients)

    def mask_client(client: int) -> Any:
        vector = code.encode_vector(torch.from_numpy(vectors[client - absent]))
        upload, records[client] = mask_vector(session, client, records[client], vector)
        return upload

    uploads, mask_seconds = _time_all(mask_client, survivors)
    start = time.perf_counter()
    server = SecureSumServer(session)
    for client, upload in zip(survivors, uploads, strict=True):
        server.add_upload(client, upload)
    requests = [server.request_unmasking(client) for client in survivors]
    server_seconds = time.perf_counter() - start

    answering = survivors[: len(survivors) - absent]
    answers, reveal_seconds = _time_all(
        lambda client: reveal_shares(session, client, records[client], requests[client - absent])[0], answering
    )
    start = time.perf_counter()
    for client, answer in zip(answering, answers, strict=True):
        server.add_shares(client, answer)
    total = code.decode_sum(server.recover_sum())
    server_seconds += time.perf_counter() - start
    up = 4 * parameters + len(uploads[0].packets) + len(answers[0])
    down = 2 * len(json.dumps(session.to_plain())) + len(requests[0].packets)
    client_seconds = median(mask_seconds) + median(reveal_seconds)
    return _make_row(client_seconds, server_seconds, (up, down), _largest_error(total.numpy(), vectors))


def measure_tenseal(clients: int, parameters: int) -> Row:
    """Clients encrypt with a key that the server does not hold; the server adds ciphertexts."""
    import numpy as np
    import tenseal

    secret = tenseal.context(tenseal.SCHEME_TYPE.CKKS, 2 * SLOTS, coeff_mod_bit_sizes=list(MODULUS_BITS))
    secret.global_scale = 2.0**PRECISION_BITS
    public = secret.copy()
    public.make_context_public()
    vectors = _draw_vectors(ENCRYPTED_CLIENTS, parameters)

    def encrypt_vector(vector: Any) -> list[bytes]:
        parts = (vector[start : start + SLOTS] for start in range(0, parameters, SLOTS))
        return [tenseal.ckks_vector(secret, part.tolist()).serialize() for part in parts]

    sent, client_seconds = _time_all(encrypt_vector, vectors)
    start = time.perf_counter()
    total = [tenseal.ckks_vector_from(public, part) for part in sent[0]]
    for message in sent[1:]:
        for position, part in enumerate(message):
            total[position] += tenseal.ckks_vector_from(public, part)
    server = (time.perf_counter() - start) * clients / ENCRYPTED_CLIENTS
    packed = [part.serialize() for part in total]
    start = time.perf_counter()
    decrypted = [tenseal.ckks_vector_from(secret, part).decrypt() for part in packed]
    decrypt = time.perf_counter() - start
    size = (sum(map(len, sent[0])), sum(map(len, packed)))
    return {
        **_make_row(median(client_seconds), server, size, _largest_error(np.concatenate(decrypted), vectors)),
        "decrypt_s": decrypt,
    }


CASES: dict[str, Callable[..., Row]] = {
    "plain": measure_plain,
    "secure": measure_secure,
    "secure, absent": lambda clients, parameters: measure_secure(clients, parameters, absent=clients // 10),
    "tenseal": measure_tenseal,
}


def _draw_vectors(clients: int, parameters: int) -> list[Any]:
    """A float32 vector of norm `CLIP` per client."""
    import numpy as np

    draw = np.random.default_rng(0)
    vectors = [draw.standard_normal(parameters, dtype=np.float32) for _ in range(clients)]
    return [vector * np.float32(CLIP * 0.999 / np.linalg.norm(vector)) for vector in vectors]


def _largest_error(total: Any, vectors: Sequence[Any]) -> float:
    import numpy as np

    exact = np.sum(vectors, axis=0, dtype=np.float64)
    return float(np.abs(total - exact).max())


def _time_all(work: Callable[[Any], Any], items: Sequence[Any]) -> tuple[list[Any], list[float]]:
    """The result for each item, and its seconds."""
    results, seconds = [], []
    for item in items:
        start = time.perf_counter()
        results.append(work(item))
        seconds.append(time.perf_counter() - start)
    return results, seconds


def _make_row(client_seconds: float, server_seconds: float, size: tuple[int, int], error: float) -> Row:
    seconds = {"client_s": client_seconds, "server_s": server_seconds}
    return {**seconds, "bytes_up": size[0], "bytes_down": size[1], "error": error}


# ------------------------------------------------------------------------------------------------------ the driver


def main() -> None:
    """Run the cases, print their table, write the file."""
    options = _parse_options()
    if options.case:
        print(json.dumps(CASES[options.case](*json.loads(options.arguments))))
        return
    from harness.report import describe_hardware, write_report

    rows = []
    for clients in options.clients:
        for parameters in options.parameters:
            for contender in CASES:
                python = options.tenseal_python if contender == "tenseal" else Path(sys.executable)
                if not python.exists():
                    continue
                numbers = _run_case(python, contender, clients, parameters)
                rows.append({"contender": contender, "clients": clients, "parameters": parameters, **numbers})
    hardware = describe_hardware()
    made = datetime.now(UTC).isoformat(timespec="seconds")
    write_report(options.out, {"made": made, "hardware": hardware, "threads": 1, "about": ABOUT, "rows": rows})
    print(f"{hardware['cpu']}, {hardware['cores']} cores, one thread")
    print(_format_table(rows))
    if not options.tenseal_python.exists():
        print(f"tenseal is left out: {options.tenseal_python} does not exist; see --help for how to install it")
    print(f"written to {options.out}")


def _run_case(python: Path, case: str, *arguments: Any) -> Row:
    print(case, *arguments, file=sys.stderr, flush=True)
    command = [str(python), str(HERE / "secure_sum.py"), "--case", case, "--arguments", json.dumps(arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    numbers: Row = json.loads(done.stdout)
    return numbers


def _format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| clients | parameters | sum | client s | server s | decrypt s | MB up | MB down | error |"]
    lines.append("|" + "---|" * 9)
    for row in rows:
        decrypt = f"{row['decrypt_s']:.3g}" if "decrypt_s" in row else ""
        seconds = f"{row['client_s']:.3g} | {row['server_s']:.3g} | {decrypt}"
        size = f"{row['bytes_up'] / 1e6:.3f} | {row['bytes_down'] / 1e6:.3f}"
        case = f"{row['clients']} | {row['parameters']} | {row['contender']}"
        lines.append(f"| {case} | {seconds} | {size} | {row['error']:.1e} |")
    return "\n".join(lines)


def _parse_options() -> argparse.Namespace:
    def read_numbers(text: str) -> list[int]:
        return [int(float(part)) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=read_numbers, default=[10, 50])
    parser.add_argument("--parameters", type=read_numbers, default=[10_000, 1_000_000])
    parser.add_argument("--tenseal-python", type=Path, default=HERE / ".venvs" / "tenseal" / "bin" / "python")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "secure-sum.json")
    parser.add_argument("--case", choices=sorted(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--arguments", default="[]", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
