"""What a generation that is over has left on the servers, read by the next one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from elastic.comm.server.requests import (
    ANSWER_LIMIT_S,
    Freeze,
    Listed,
    ReadFrozen,
    Request,
    hash_of,
    receive_tensors,
    to_json,
)
from elastic.core.errors import ElasticError, IntegrityError
from elastic.core.server.continuing import HeldCopy, Whole
from elastic.core.typed_json import decode
from elastic.transport.channel import Message, checked
from elastic.transport.handshake import Address, connect

logger = logging.getLogger(__name__)

# By step and rank.
Notes = Mapping[int, Mapping[int, str]]


def freeze(addresses: Mapping[str, Address], token: bytes, generation: int) -> dict[str, list[HeldCopy]]:
    """End all generations before this one on these servers; what each of them holds of those. One that does not answer
    holds nothing."""
    found: dict[str, list[HeldCopy]] = {}
    for name, address in addresses.items():
        try:
            message, _ = _asked(address, token, Freeze(generation))
            found[name] = [decode(HeldCopy, copy) for copy in message["held"]]
        except (OSError, ElasticError) as error:
            logger.warning("parameter server %s does not say what it holds: %s", name, error)
    return found


def read_shard(
    address: Address, token: bytes, whole: Whole, shard: int, noted: int, scales: Mapping[int, float]
) -> tuple[Message, Mapping[str, torch.Tensor]]:
    """One shard of `whole`, and in its answer the notes of steps after `noted`. Raises IntegrityError, OSError."""
    answer, tensors = _asked(address, token, ReadFrozen(shard, whole.epoch, whole.version, noted, scales))
    if hash_of(tensors.values()) != answer["xxh3"]:
        raise IntegrityError(f"shard {shard} after update {whole.version} did not arrive as it was sent")
    return answer, tensors


def notes_of(answer: Message) -> Notes:
    found: dict[int, dict[int, str]] = {}
    for step, rank, note in answer["notes"]:
        found.setdefault(step, {})[rank] = note
    return found


def _asked(address: Address, token: bytes, request: Request) -> tuple[Message, dict[str, torch.Tensor]]:
    channel = connect(address, token)
    try:
        channel.limit(ANSWER_LIMIT_S)
        channel.send(to_json(request))
        answer = checked(channel.receive()[0])
        listed: Sequence[tuple[str, int]] = answer.get("tensors", ())
        names: Listed = tuple((name, numel) for name, numel in listed)
        return answer, receive_tensors(channel, names)
    finally:
        channel.close()
