"""A node's snapshot server.

| module | what it is |
|---|---|
| `snapshot_server.py`, `sessions.py` | sockets and threads; the requests of a connection |
| `buffer_table.py` | which buffer may be overwritten, freed or read; pure bookkeeping |
| `segment_pool.py` | the segments and their table, behind one lock |
| `node_shards.py` | whole shards in the pool: a node's own and replicas |
| `parity.py`, `parity_blocks.py` | parity in the pool, and shards rebuilt from it; how shares are XORed together |
| `replication.py`, `sender.py`, `hasher.py` | when a rank's snapshot is complete; sent to one other node; hashed |
| `transfer.py` | the bytes of shards between nodes |
"""
