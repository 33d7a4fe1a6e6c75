"""What workers, servers and who announces views send each other, over the run's authenticated channels.

A request is a JSON message; tensors follow it as raw bytes, all fp32, one after the other. Every answer is JSON, and
tensors follow where it names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from elastic.comm.server.shard import Options, ShardSpec
from elastic.core.errors import IntegrityError
from elastic.core.server.global_batches import Answer, Batch, Batches, Event, Part
from elastic.core.server.placement import Role, View
from elastic.core.typed_json import decode, encode
from elastic.transport.channel import Channel, Message

# An update of a large shard takes a while, and its replica makes it first.
ANSWER_LIMIT_S = 60.0

# A message and the tensors that follow it.
Answered = tuple[Message, Sequence[torch.Tensor]]
# (name, number of elements): what follows a message.
Listed = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Install:
    """A newer view. An older one changes nothing."""

    view: View


@dataclass(frozen=True)
class ReadView:
    """Answered with the newest view that the server has heard of."""


@dataclass(frozen=True)
class Load:
    """The whole state of a shard: to the primary when a run begins, or from the primary to a new replica. `name` is
    another one for each beginning: the same may come twice, where an answer was lost."""

    shard: int
    epoch: int
    role: Role
    name: str
    spec: ShardSpec
    meta: dict[str, Any]
    batches: Batches | None
    tensors: Listed


@dataclass(frozen=True)
class Protect:
    """Answered when the shard's replica is in step."""

    shard: int
    epoch: int


@dataclass(frozen=True)
class Push:
    """`options`: what the update that it is in is made with, for each group of the optimizer; none: what the shard
    began with. All gradients of an update have the same."""

    shard: int
    epoch: int
    role: Role
    part: Part
    tensors: Listed
    options: Options = ()


@dataclass(frozen=True)
class Apply:
    """From a primary to its replica."""

    shard: int
    epoch: int
    version: int
    batch: Batch
    scale: float | None = None


@dataclass(frozen=True)
class Pull:
    """The parameters after at least `version` updates, unless the worker `have`s them; a shard that lags behind makes
    the updates first, from `batches`."""

    shard: int
    epoch: int
    version: int
    have: int
    batches: Mapping[int, Batch]


@dataclass(frozen=True)
class Advance:
    """Of a run whose ranks have each their own micro-batch in every step. On all shards, on all copies, are the
    gradients of the first `steps` steps of rank `rank`, micro-batches step * ranks + rank.

    Answered as `Pull` with the parameters after as many updates as all ranks have steps, `version` at least; with
    `waits` true where there are not so many after `wait_s`. With `measures` no update is made: the answer has their
    number, and the squared norms of the gradients of the last updates and of those to be made. Then the same request
    comes with that number, or a lower one, as `until`: no more updates are made, each by its part in `scales`.
    """

    shard: int
    epoch: int
    rank: int
    steps: int
    version: int
    have: int
    wait_s: float
    measures: bool = False
    until: int | None = None
    scales: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ReadState:
    """Answered with a shard's state as it is, and its version."""

    shard: int
    epoch: int


@dataclass(frozen=True)
class Close:
    """A rank has closed its step: `note` is what it has to say of it. Notes of steps before `forget` are not needed any
    more."""

    shard: int
    epoch: int
    role: Role
    rank: int
    step: int
    note: str
    forget: int


@dataclass(frozen=True)
class Freeze:
    """Nothing more is done in generations before this one. Answered with what this server holds of them."""

    generation: int


@dataclass(frozen=True)
class ReadFrozen:
    """The state of a shard after `version` updates of a frozen generation, with the hash of its bytes, and the notes of
    the steps after `noted`, up to that one."""

    shard: int
    epoch: int
    version: int
    noted: int
    scales: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Tell:
    """An event, to the shard that keeps the rules' state. Where the answer is to wait, it is given after `wait_s`."""

    shard: int
    epoch: int
    role: Role
    event: Event
    wait_s: float = 0.0


@dataclass(frozen=True)
class ReadBatches:
    """Answered with the rules' state."""

    shard: int
    epoch: int


@dataclass(frozen=True)
class ReadCut:
    """A shard's state after exactly `version` updates."""

    shard: int
    epoch: int
    version: int
    batches: Mapping[int, Batch]


OfShard = Load | Protect | Push | Apply | Pull | Advance | Close | ReadState | Tell | ReadBatches | ReadCut
Request = Install | ReadView | Freeze | ReadFrozen | OfShard


@dataclass(frozen=True)
class _Sent:
    request: Request


@dataclass(frozen=True)
class _Answered:
    answer: Answer


def to_json(request: Request) -> Message:
    return encode(_Sent(request))


def from_json(message: Message) -> Request:
    try:
        return decode(_Sent, message).request
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"a request that this version does not know: {error}") from error


def answer_to_json(answer: Answer) -> Message:
    return encode(_Answered(answer))


def answer_from_json(message: Message) -> Answer:
    return decode(_Answered, message).answer


def listed(tensors: Mapping[str, torch.Tensor]) -> Listed:
    return tuple((name, tensor.numel()) for name, tensor in tensors.items())


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous fp32 tensor."""
    if tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise IntegrityError(f"a tensor of {tensor.dtype} cannot travel to a parameter server")
    return tensor.detach().reshape(-1).numpy().data.cast("B")


def hash_of(tensors: Iterable[torch.Tensor]) -> str:
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(as_bytes(tensor))
    return digest.hexdigest()


def send_tensors(channel: Channel, tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        channel.send_bytes(as_bytes(tensor))


def receive_tensors(channel: Channel, names: Listed) -> dict[str, torch.Tensor]:
    tensors = {name: torch.empty(numel) for name, numel in names}
    channel.recv_into([as_bytes(tensor) for tensor in tensors.values()])
    return tensors
