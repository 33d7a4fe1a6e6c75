"""Snapshots in the memory of nodes.

    worker                          node (agent process)                    another node
    SnapshotClient --Unix socket--> SnapshotServer: NodeShards, a Sender --TCP--> SnapshotServer: NodeShards, Parity
      copies into a segment           for each node that keeps its shards           receives into a segment, or XORs

A segment is anonymous memory (memfd) that the server creates and the worker maps, so the death of a worker frees
nothing, and no file remains in /dev/shm. The server imports neither torch nor Ray.

| module | what it is |
|---|---|
| `messages.py`, `records.py` | one class per verb, with its JSON form; shard records as JSON |
| `snapshot_client.py`, `link.py` | the worker's side: writing snapshots, over one connection at a time |
| `source.py` | reading snapshots back, from the own node or others |
| `segments.py`, `limits.py` | one segment of memory; how much memory a node has |
| `shard_buffers.py`, `work_counter.py` | shard keys and buffers; progress of hashing and rebuilding |
| `server/` | the node's side: see there |
"""
