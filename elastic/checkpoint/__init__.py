"""Training state at rest.

| module | what it is |
|---|---|
| `snapshot.py`, `shards.py` | a rank's state in host memory; as one safetensors file |
| `hashing.py`, `digest.py` | content checks that do not depend on how a tensor is cut; of torch tensors |
| `storage.py`, `writer.py` | the storage tier; writing concurrently with training |
| `source.py`, `reading.py` | where state is restored from; byte ranges of shards |
| `memory/` | snapshots in the memory of nodes |
"""
