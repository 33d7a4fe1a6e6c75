"""Messages of the memory tier: one frozen class per verb, each with an exact JSON form.

A request is `{"do": VERB, <fields>}`. Its answer has the fields of the class that the request's docstring names, or is
an error (`transport.channel.error_message`). Every reader here raises IntegrityError for another verb, a missing or
unknown field, and a value of another type: the other side holds the run's token, but may be faulty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar, cast, get_args

from elastic.checkpoint.memory.records import count, extra_state_from_json, template_from_json, template_to_json, text
from elastic.checkpoint.memory.shard_buffers import SnapshotRef
from elastic.core.checkpoint.manifest import Json, ShardRecord
from elastic.core.errors import IntegrityError
from elastic.transport.channel import Message
from elastic.transport.handshake import Address

# How long the server waits for a reader to release a buffer.
READER_LIMIT_S = 20.0
# The most bytes of one measurement of a connection.
PROBE_LIMIT_BYTES = 16 << 20

_T = TypeVar("_T")


def _read(read: Callable[[Any], Any], write: Callable[[Any], Json] = lambda value: value) -> dict[str, Any]:
    """How a field is read from JSON and written. `read` raises ValueError, TypeError or IntegrityError."""
    return {"read": read, "write": write}


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"{value!r} is not a list")
    return value


def _counts(value: Any) -> tuple[int, ...]:
    return tuple(map(count, _list(value)))


def _pair(value: Any) -> tuple[int, int]:
    first, second = _counts(value)
    return first, second


def _part(value: Any) -> tuple[int, int, int, int]:
    begin, width, rows, stride = _counts(value)
    if not rows or (rows > 1 and not 0 < width <= stride):
        raise ValueError(f"{rows} rows of {width} bytes that are {stride} apart")
    return begin, width, rows, stride


def _parts(value: Any) -> tuple[tuple[int, int, int, int], ...]:
    return tuple(map(_part, _list(value)))


def _ref(value: Any) -> SnapshotRef | None:
    if value is None:
        return None
    generation, step = _list(value)
    # (-1, -1) is a server's "no snapshot is known to be complete".
    return (-1, -1) if (generation, step) == (-1, -1) else (count(generation), count(step))


def _address(value: Any) -> Address:
    host, port = _list(value)
    return text(host), count(port)


def _addresses(value: Any) -> tuple[Address, ...]:
    return tuple(map(_address, _list(value)))


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _step(value: Any) -> int:
    return -1 if value == -1 else count(value)


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not value >= 0:
        raise ValueError(f"{value!r} is not a number of seconds")
    return float(value)


def _optional_text(value: Any) -> str | None:
    return None if value is None else text(value)


# --- a worker to the server of its own node ---


@dataclass(frozen=True)
class OpenShard:
    """Begin a generation's shard, or continue it on a new connection. Answer: `Opened`.

    Replicas of each snapshot go to `targets`; with `stripe` (ranks), the targets keep parity instead. `base` is the
    snapshot that the generation was restored from. A target that takes no replicas is replaced by one of `spares`.
    `mapped` are the numbers of the segments that the worker still has mapped, from older generations too.
    """

    do: ClassVar[str] = "open"
    template: ShardRecord = field(metadata=_read(template_from_json, template_to_json))
    targets: tuple[Address, ...] = field(metadata=_read(_addresses))
    base: SnapshotRef | None = field(metadata=_read(_ref))
    stripe: tuple[int, ...] = field(metadata=_read(_counts))
    spares: tuple[Address, ...] = field(metadata=_read(_addresses))
    mapped: tuple[int, ...] = field(default=(), metadata=_read(_counts))


@dataclass(frozen=True)
class BeginSnapshot:
    """Ask for the memory of the next snapshot. Answer: `GivenSegment`, with a descriptor where it is new."""

    do: ClassVar[str] = "begin"


@dataclass(frozen=True)
class CommitSnapshot:
    """The assigned memory holds the snapshot of this step. Answer: `Done`."""

    do: ClassVar[str] = "commit"
    step: int = field(metadata=_read(count))
    extra_state: dict[str, Json] | None = field(metadata=_read(extra_state_from_json))


@dataclass(frozen=True)
class SettleSnapshot:
    """Every rank's snapshot of this step is complete. Answer: `Done`."""

    do: ClassVar[str] = "settle"
    step: int = field(metadata=_read(count))


@dataclass(frozen=True)
class LeaseShard:
    """Read a shard of this node in place. Answer: `Leased` with a read-only descriptor; then `Release`, then `Done`.

    The bytes are valid only after the last answer.
    """

    do: ClassVar[str] = "lease"
    generation: int = field(metadata=_read(count))
    step: int = field(metadata=_read(count))
    rank: int = field(metadata=_read(count))


@dataclass(frozen=True)
class Release:
    """The reader is done with the buffer. Answer: `Done`."""

    do: ClassVar[str] = "release"


# --- a server, or a worker of another node, to a server ---


@dataclass(frozen=True)
class OpenReplica:
    """Replicas of this shard follow on this connection. Answer: `Done`."""

    do: ClassVar[str] = "open_replica"
    template: ShardRecord = field(metadata=_read(template_from_json, template_to_json))
    base: SnapshotRef | None = field(metadata=_read(_ref))


@dataclass(frozen=True)
class OpenParity:
    """Shares of the parity of `ranks`, one of which is the template's, follow on this connection. Answer: `Done`."""

    do: ClassVar[str] = "open_parity"
    ranks: tuple[int, ...] = field(metadata=_read(_counts))
    template: ShardRecord = field(metadata=_read(template_from_json, template_to_json))
    base: SnapshotRef | None = field(metadata=_read(_ref))


@dataclass(frozen=True)
class PushReplica:
    """A replica of this step. Answer: `Accepted`; unless the server has it, then all bytes, `ShardHash`, `Done`."""

    do: ClassVar[str] = "push"
    step: int = field(metadata=_read(count))
    extra_state: dict[str, Json] | None = field(metadata=_read(extra_state_from_json))
    settled: SnapshotRef | None = field(metadata=_read(_ref))


@dataclass(frozen=True)
class PushShare:
    """A share of this step's parity: like `PushReplica`, with the bytes from `Accepted.begin` on, in hashed chunks."""

    do: ClassVar[str] = "share"
    step: int = field(metadata=_read(count))
    extra_state: dict[str, Json] | None = field(metadata=_read(extra_state_from_json))
    settled: SnapshotRef | None = field(metadata=_read(_ref))


@dataclass(frozen=True)
class ShardHash:
    """Every byte was sent; their xxh3 as hexadecimal digits."""

    do: ClassVar[str] = "hash"
    xxh3: str = field(metadata=_read(text))


@dataclass(frozen=True)
class ReadShard:
    """Read parts of a shard: (begin, width, rows, stride), in bytes but for the number of rows. Rows do not overlap.

    Answer: `Done` and the rows of all parts, one after another; then `Release`, then `Done`.
    """

    do: ClassVar[str] = "read"
    generation: int = field(metadata=_read(count))
    step: int = field(metadata=_read(count))
    rank: int = field(metadata=_read(count))
    parts: tuple[tuple[int, int, int, int], ...] = field(metadata=_read(_parts))


def _probe_size(value: Any) -> int:
    size = count(value)
    if size > PROBE_LIMIT_BYTES:
        raise ValueError(f"a probe of {size} bytes, of {PROBE_LIMIT_BYTES} at most")
    return size


@dataclass(frozen=True)
class ProbeSending:
    """So many bytes follow, of no meaning: the connection is measured. Answer, after all of them: `Done`."""

    do: ClassVar[str] = "probe_sending"
    nbytes: int = field(metadata=_read(_probe_size))


@dataclass(frozen=True)
class ProbeReceiving:
    """Answer: so many zeros, then `Done`."""

    do: ClassVar[str] = "probe_receiving"
    nbytes: int = field(metadata=_read(_probe_size))


# --- answers ---


@dataclass(frozen=True)
class Done:
    pass


@dataclass(frozen=True)
class Opened:
    """`step` of the newest snapshot that the rank has committed in this generation, -1 where there is none.

    `kept`: those of the mapped segments that may be given to this worker again. It unmaps the others.
    """

    step: int = field(metadata=_read(_step))
    kept: tuple[int, ...] = field(metadata=_read(_counts))


@dataclass(frozen=True)
class GivenSegment:
    number: int = field(metadata=_read(count))
    nbytes: int = field(metadata=_read(count))


@dataclass(frozen=True)
class Leased:
    nbytes: int = field(metadata=_read(count))


@dataclass(frozen=True)
class Accepted:
    """`have`: the server already has all bytes. `begin`: the first byte that it lacks."""

    have: bool = field(metadata=_read(_bool))
    begin: int = field(metadata=_read(count))


@dataclass(frozen=True)
class Progress:
    """Replication of one rank's snapshots, reported without a request.

    `complete_step` is -1 while there is none; `seconds`: the last one's duration from its commit on. `failed`: why
    replication does not proceed at the moment. `lost`: it was given up for this generation. `lacks_memory`: because a
    node that keeps replicas or parity has too little memory for them. `moved`: which node has taken the place of which
    one last, and why.
    """

    generation: int = field(metadata=_read(count))
    complete_step: int = field(metadata=_read(_step))
    failed: str | None = field(metadata=_read(_optional_text))
    lost: bool = field(metadata=_read(_bool))
    lacks_memory: bool = field(metadata=_read(_bool))
    seconds: float = field(metadata=_read(_seconds))
    sent_bytes: int = field(metadata=_read(count))
    moved: str | None = field(metadata=_read(_optional_text))


WorkerRequest = OpenShard | BeginSnapshot | CommitSnapshot | SettleSnapshot | LeaseShard
PeerRequest = OpenReplica | OpenParity | PushReplica | PushShare | ReadShard | ProbeSending | ProbeReceiving
Request = WorkerRequest | PeerRequest | ShardHash | Release


def request_to_json(request: Request) -> Message:
    return {"do": request.do, **to_json(request)}


def worker_request(data: Message) -> WorkerRequest:
    return cast(WorkerRequest, _request(data, get_args(WorkerRequest), "a worker"))


def peer_request(data: Message) -> PeerRequest:
    return cast(PeerRequest, _request(data, get_args(PeerRequest), "a peer"))


def expected(data: Message, kind: type[_T]) -> _T:
    """A request that must be of this kind, because of the one before it."""
    return cast(_T, _request(data, (kind,), "the other side"))


def to_json(message: Any) -> Message:
    """The fields of an answer or of Progress."""
    return {each.name: each.metadata["write"](getattr(message, each.name)) for each in fields(message)}


def from_json(data: Message, kind: type[_T]) -> _T:
    """Inverse of `to_json`."""
    known = fields(cast(Any, kind))
    if type(data) is not dict or data.keys() != {each.name for each in known}:
        raise IntegrityError(f"a message {kind.__name__} has other fields than this version sends: {_names(data)}")
    try:
        return kind(**{each.name: each.metadata["read"](data[each.name]) for each in known})
    except (TypeError, ValueError) as error:
        raise IntegrityError(f"a message {kind.__name__} is malformed: {error}") from error


def _request(data: Message, kinds: tuple[Any, ...], who: str) -> object:
    verb = data.get("do")
    kind = next((kind for kind in kinds if kind.do == verb), None)
    if kind is None:
        raise IntegrityError(f"{who} sent the request {verb!r}, which is not one that may come here")
    return from_json({name: value for name, value in data.items() if name != "do"}, kind)


def _names(data: Any) -> str:
    return ", ".join(map(repr, list(data)[:10])) if isinstance(data, dict) else repr(data)[:100]
