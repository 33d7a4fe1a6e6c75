"""Transfer of shards between nodes: to the keeper of a replica or of parity, and to a node that rebuilds a shard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import xxhash

from elastic.checkpoint.memory.messages import ReadShard, Release, ShardHash, expected, request_to_json
from elastic.checkpoint.memory.segments import Segment
from elastic.checkpoint.memory.server.parity import Contribution
from elastic.checkpoint.memory.server.parity_blocks import CHUNK_BYTES, HASH_BYTES, chunk_hash
from elastic.core.checkpoint.snapshots import Held
from elastic.core.errors import StorageError, Where
from elastic.transport.channel import Channel, checked
from elastic.transport.handshake import Address, connect


def send_replica(channel: Channel, segment: Segment) -> str:
    """Send every byte; returns their xxh3."""
    xxh3 = xxhash.xxh3_64()
    with segment.map() as view:
        for at in range(0, segment.nbytes, CHUNK_BYTES):
            with view[at : at + CHUNK_BYTES] as chunk:
                xxh3.update(chunk)
                channel.send_file(segment.fd, at, len(chunk))
    channel.ask(request_to_json(ShardHash(xxh3.hexdigest())))
    return str(xxh3.hexdigest())


def send_share(channel: Channel, segment: Segment, begin: int) -> str:
    """Send the bytes from `begin` on, each chunk after its hash; returns the xxh3 of all bytes."""
    xxh3 = xxhash.xxh3_64()
    channel.cork(True)
    with segment.map() as view:
        for at in range(0, segment.nbytes, CHUNK_BYTES):
            with view[at : at + CHUNK_BYTES] as chunk:
                xxh3.update(chunk)
                if at >= begin:
                    channel.send_bytes(chunk_hash(chunk))
                    channel.send_file(segment.fd, at, len(chunk))
    channel.cork(False)
    channel.ask(request_to_json(ShardHash(xxh3.hexdigest())))
    return str(xxh3.hexdigest())


def receive_share(channel: Channel, share: Contribution) -> int:
    """Receive what `send_share` sends; returns the number of bytes. The share is complete when this returns."""
    scratch = memoryview(bytearray(min(CHUNK_BYTES, share.nbytes)))
    for at in range(share.begin, share.nbytes, CHUNK_BYTES):
        with scratch[: share.nbytes - at] as chunk:
            found = channel.exactly(HASH_BYTES)
            channel.recv_into([chunk])
            share.add(chunk, found)
    share.end(expected(checked(channel.receive()[0]), ShardHash).xxh3)
    return share.nbytes - share.begin


def read_shard(token: bytes, source: Address, held: Held, length: int) -> Iterator[memoryview]:
    """Yield the first `length` bytes of a shard in chunks; each chunk overwrites the one before.

    Raises StorageError when the source cannot be reached, and IntegrityError when it does not hold the shard any more.
    """
    request = ReadShard(held.generation, held.step, held.rank, ((0, length, 1, 0),))
    scratch = memoryview(bytearray(min(CHUNK_BYTES, length)))
    try:
        with closing(connect(source, token)) as channel:
            channel.ask(request_to_json(request))
            for at in range(0, length, CHUNK_BYTES):
                with scratch[: length - at] as chunk:
                    channel.recv_into([chunk])
                    yield chunk
            channel.ask(request_to_json(Release()))
    except OSError as error:
        where = Where(rank=held.rank, step=held.step, generation=held.generation)
        raise StorageError(f"a shard could not be read from {source[0]}:{source[1]}: {error}", where) from error
