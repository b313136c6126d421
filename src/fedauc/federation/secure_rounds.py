"""The server's side of a secure round: one exchange for the masked uploads, and one for the shares that unmask the sum.

Every masked upload is added to a running sum as it arrives, and none is kept. The server learns the sum over the sites
that answered, and nothing else of their uploads (`fedauc.privacy.secure_sum` says exactly what, and for whom).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedauc.federation.exchange import AnswerRefused, Exchange, ExchangeResult, decline_when_closed, read_answer
from fedauc.federation.serialization import Payload, pack_payload, unpack_tensors
from fedauc.interfaces import Cohort
from fedauc.privacy.secure_sum import MaskedUpload, SecureSumServer, SecureSumSession, create_session_id
from fedauc.transforms._prepared_secure_sum import PreparedSecureSum
from fedauc.trees import Tree, tree_leaves, tree_map

MASKED, PACKETS, SHARES = "masked", "packets", "shares"
"""The names of the tensors in secure messages."""


class SecureOutcome(NamedTuple):
    """The sum over the survivors, or why there is none, and how the first exchange went."""

    total: Tensor | None
    survivors: tuple[int, ...]
    problem: str
    result: ExchangeResult[None]


class SecureRounds:
    """The secure sums of a run. `public_keys` are those that the sites registered, by client, as hexadecimal text."""

    def __init__(
        self, exchange: Exchange, transform: PreparedSecureSum, run_id: str, public_keys: Mapping[int, str]
    ) -> None:
        self._exchange, self._transform = exchange, transform
        self._run_id, self._public_keys = run_id, dict(public_keys)

    def sum_uploads(
        self,
        cohort: Cohort,
        excluded: Collection[int],
        length: int,
        pack_message: Callable[[int, SecureSumSession], Payload],
        check_header: Callable[[int, dict[str, Any]], None],
        on_missing_state: Callable[[int, str], None],
    ) -> SecureOutcome:
        """Ask the sites of a cohort for masked uploads, then those that answered for shares.

        `excluded` are not asked. `pack_message` makes the message of a client's visit, and `check_header` refuses
        answers that must not be used.
        """
        asked = tuple(client for client in cohort.clients if client not in excluded)
        threshold = self._transform.least_clients(len(cohort.clients) + len(cohort.absent))
        if len(asked) < threshold:
            problem = f"{len(asked)} of {len(cohort.clients)} sites could be asked; the secure sum needs {threshold}"
            return SecureOutcome(None, (), problem, ExchangeResult())
        session = self._open_session(cohort.round, asked, threshold, length)
        server = SecureSumServer(session, self._transform.minimum_cohort)

        def add_upload(client: int, payload: Payload) -> None:
            check_header(client, read_answer(payload, "visit"))
            server.add_upload(client, _read_masked_upload(payload, session))

        messages = {client: partial(pack_message, client, session) for client in asked}
        is_waiting = self._exchange.policy.on_group_offline == "wait"
        read_upload = add_upload if is_waiting else decline_when_closed(add_upload)
        result = self._exchange.ask_sites(messages, read_upload, on_missing_state)
        survivors = server.survivors
        least = max(session.threshold, min(self._exchange.policy.quorum, len(cohort.clients)))
        if len(survivors) < least:
            problem = f"{len(survivors)} of {len(cohort.clients)} sites answered; the secure sum needs {least}"
            return SecureOutcome(None, survivors, problem, result)
        # Answers may come in any order, and any `threshold` of them are enough.
        self._exchange.ask_sites(
            {client: partial(self._pack_request, server, session, client) for client in survivors},
            lambda client, payload: server.add_shares(client, _read_shares(payload)),
            is_enough=lambda: server.has_enough_shares,
        )
        try:
            return SecureOutcome(server.recover_sum(), survivors, "", result)
        except ValueError as error:
            return SecureOutcome(None, survivors, f"the secure sum could not be unmasked: {error}", result)

    def _open_session(self, round: int, asked: tuple[int, ...], threshold: int, length: int) -> SecureSumSession:
        """A new session for a round; a round that is repeated gets another one."""
        missing = [client for client in asked if client not in self._public_keys]
        assert not missing, f"clients {missing} have rows but no key"
        return SecureSumSession(
            session_id=create_session_id(round),
            members=tuple(sorted(asked)),
            public_keys=tuple(bytes.fromhex(self._public_keys[client]) for client in sorted(asked)),
            threshold=threshold,
            length=length,
        )

    def _pack_request(self, server: SecureSumServer, session: SecureSumSession, client: int) -> Payload:
        request = server.request_unmasking(client)
        header = {"kind": "unmask", "client": client, "survivors": list(request.survivors)}
        header |= {"session": session.to_plain(), "run": self._run_id}
        return pack_payload(header, {PACKETS: bytes_to_tensor(request.packets)})


def flatten_integers(tree: Tree) -> Tensor:
    """All numbers of a tree of int32 tensors as one vector."""
    return torch.cat([leaf.reshape(-1) for leaf in tree_leaves(tree)])


def rebuild_integers(vector: Tensor, template: Tree) -> Tree:
    """The tree with the template's shapes from the vector that `flatten_integers` made."""
    parts = iter(torch.split(vector, [leaf.numel() for leaf in tree_leaves(template)]))
    return tree_map(lambda leaf: next(parts).view(leaf.shape), template)


def bytes_to_tensor(content: bytes) -> Tensor:
    """Bytes as a uint8 tensor, which a payload can hold."""
    return torch.from_numpy(np.frombuffer(content, np.uint8).copy())


def tensor_to_bytes(tensor: Tensor) -> bytes:
    """The bytes of a uint8 tensor."""
    if tensor.dtype != torch.uint8:
        raise ValueError(f"bytes have the type {tensor.dtype}; it must be torch.uint8: send bytes")
    return tensor.numpy().tobytes()


def _read_masked_upload(payload: Payload, session: SecureSumSession) -> MaskedUpload:
    max_bytes = 4 * session.length + session.packet_bytes * len(session.members)
    tensors = unpack_tensors(payload, max_bytes)
    if {name: len(leaves) for name, leaves in tensors.items()} != {MASKED: 1, PACKETS: 1}:
        raise AnswerRefused(f"it contains {sorted(tensors)}; expected are {[MASKED, PACKETS]}")
    return MaskedUpload(tensors[MASKED][0], tensor_to_bytes(tensors[PACKETS][0]))


def _read_shares(payload: Payload) -> bytes:
    read_answer(payload, "unmask")
    tensors = unpack_tensors(payload).get(SHARES, [])
    if len(tensors) != 1:
        raise AnswerRefused(f"it contains {len(tensors)} tensors of shares; expected is 1")
    return tensor_to_bytes(tensors[0])
