"""Snapshots in the memory of nodes.

    worker                      node (agent process)                      another node
    NodeMemory  --Unix socket-->  MemoryServer: Store, one Sender  --TCP-->  MemoryServer: Store
      copies into a segment       per node it is kept on                     receives into a segment, or XORs into one

A segment is anonymous memory (memfd) that the server creates and the worker maps, so a worker that dies takes nothing
along and nothing is left behind in /dev/shm. The server's side imports neither torch nor Ray.

| module | what it is |
|---|---|
| `books.py`, `lines.py` | which copy may be overwritten, freed or read: pure bookkeeping |
| `shelf.py`, `pace.py` | the books and the memory they are about, behind one lock; how far work on it has come |
| `segments.py`, `limits.py` | one piece of memory; how much a node has |
| `store.py` | whole shards on the shelf: a node's own and replicas |
| `parity.py`, `blocks.py` | parity on the shelf, and shards made of it; how shares are XORed together |
| `wire.py`, `channel.py`, `records.py` | how a connection begins; messages and bytes; records as JSON |
| `sender.py`, `replication.py` | one rank's way to one other node; when its snapshot is complete |
| `transfer.py` | the bytes of shards on their way between nodes |
| `server.py`, `sessions.py` | the node's side: sockets and threads; what a connection may ask |
| `client.py`, `link.py`, `source.py` | the worker's side: writing snapshots, reading them back |
"""
