"""A node's memory of snapshots in a process of its own, as a node's agent has it, for runs without Ray.

`argv`: the run's token in hex, the run's id. Says in one line of JSON where it is; then answers every line on its input
with the newest snapshot that it holds (id and manifest), or null. Ends with its input.
"""

from __future__ import annotations

import json
import sys
import time

from elastic.checkpoint.memory.server.snapshot_server import SnapshotServer
from elastic.core.checkpoint import manifest_json
from elastic.core.checkpoint.assembly import assemble
from elastic.core.checkpoint.snapshots import snapshot_id


def main(token: str, run_id: str) -> None:
    server = SnapshotServer(bytes.fromhex(token), "127.0.0.1")
    _say({"address": server.address, "local_name": server.local_name})
    for _ in sys.stdin:
        held = max(server.held(), default=None)
        if held is None:
            _say(None)
            continue
        manifest = assemble([server.record(held)], run_id=run_id, written_at=time.time())
        _say({"id": snapshot_id(held.step, held.generation), "manifest": manifest_json.to_json(manifest)})
    server.close()


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
