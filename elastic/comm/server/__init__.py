"""A sharded, replicated parameter server with bounded staleness; its rules are in `elastic/core/server`.

| module | what it is |
|---|---|
| `shard.py` | one range of the parameters with its optimizer state: gradients in, updates |
| `requests.py` | what travels: requests, and tensors as bytes |
| `held.py` | one server's copy of a shard, and what a generation that is over has left of it |
| `shard_server.py` | a node's shards, primaries and replicas, behind a socket |
| `frozen.py` | the same, read by the generation after it |
| `shard_client.py` | requests to whoever serves a shard now; who announces views |
| `worker.py` | a worker's loop: lease, pull, gradient, push |
| `cuts.py` | consistent cuts in storage, and a run that continues from one |
"""
