"""A sharded, replicated parameter server with bounded staleness; its rules are in `elastic/core/server`.

| module | what it is |
|---|---|
| `shard.py` | one range of the parameters with its optimizer state: gradients in, updates |
| `requests.py` | what travels: requests, and tensors as bytes |
| `shard_server.py` | a node's shards, primaries and replicas, behind a socket |
| `shard_client.py` | requests to whoever serves a shard now; who announces views |
| `worker.py` | a worker's loop: lease, pull, gradient, push |
| `cuts.py` | consistent cuts in storage, and a run that continues from one |
"""
