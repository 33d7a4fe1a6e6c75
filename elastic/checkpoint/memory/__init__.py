"""Snapshots in the memory of nodes.

    worker                      node (agent process)                      another node
    NodeMemory  --Unix socket-->  MemoryServer: Store, one Sender  --TCP-->  MemoryServer: Store
      copies into a segment       per replica holder                         receives into a segment

A segment is anonymous memory (memfd) that the server creates and the worker maps, so a worker that dies takes nothing
along and nothing is left behind in /dev/shm. The server's side imports neither torch nor Ray.

| module | what it is |
|---|---|
| `books.py` | which copy may be overwritten, freed or read: pure bookkeeping |
| `store.py` | the books and the memory they are about, behind one lock |
| `segments.py`, `limits.py` | one piece of memory; how much a node has |
| `wire.py`, `records.py` | framing and authentication; records as JSON |
| `sender.py` | one shard's way to one replica holder |
| `server.py`, `sessions.py` | the node's side: sockets and threads; what a connection may ask |
| `client.py`, `source.py` | the worker's side: writing snapshots, reading them back |
"""
