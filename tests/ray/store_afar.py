"""An S3 server on a node of its own in a network of namespaces, where one node at a time can be cut from it.

What lies in it is looked at from its own node, by a process there: `python store_afar.py BUCKET` makes a bucket,
`python store_afar.py URL RUN` prints what the run has in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The server is that of the tests of storage.
sys.path.append(str(Path(__file__).resolve().parents[1] / "store"))

import s3_server
from namespaces import Network

_BUCKET = "training"
_LOOK_LIMIT_S = 60.0


@dataclass(frozen=True)
class Stored:
    """Ids of checkpoints, in order: those with a manifest, of which every byte was read; and folders without one."""

    complete: list[str]
    incomplete: list[str]


@dataclass(frozen=True)
class AfarStore:
    network: Network
    node: int
    endpoint: str

    @classmethod
    @contextlib.contextmanager
    def on(cls, network: Network, node: int) -> Iterator[AfarStore]:
        """With an empty bucket in it."""
        address = network.address(node)
        with s3_server.s3_port(network.inside(node, [sys.executable, str(s3_server.CHILD), address])) as port:
            store = cls(network, node, f"http://{address}:{port}")
            store._there(_BUCKET)
            yield store

    @property
    def url(self) -> str:
        return f"s3://{_BUCKET}/runs"

    @property
    def environment(self) -> dict[str, str]:
        """For whoever is to use it."""
        return {**s3_server.CREDENTIALS, "AWS_ENDPOINT_URL": self.endpoint}

    def look(self, run_id: str) -> Stored:
        """CalledProcessError, with what is wrong, where a checkpoint lacks anything that its manifest names."""
        return Stored(**json.loads(self._there(self.url, run_id)))

    def _there(self, *arguments: str) -> str:
        root = str(Path(__file__).resolve().parents[2])
        done = subprocess.run(
            self.network.inside(self.node, [sys.executable, __file__, *arguments]),
            env={**os.environ, **self.environment, "PYTHONPATH": root},
            stdout=subprocess.PIPE, check=True, text=True, timeout=_LOOK_LIMIT_S,
        )  # fmt: skip
        return done.stdout


def _look(url: str, run_id: str) -> dict[str, Any]:
    from elastic.checkpoint.storage import CheckpointStore

    store = CheckpointStore(url, run_id)
    complete = sorted(store.list())
    for ref in complete:
        manifest = store.manifest(ref.id)
        assert len(manifest.shards) == manifest.world_size, ref
        store.verify_shards(manifest)
    return {"complete": [ref.id for ref in complete], "incomplete": [ref.id for ref in sorted(store.incomplete())]}


if __name__ == "__main__":
    if len(sys.argv) == 2:
        s3_server.make_bucket(sys.argv[1])
    else:
        print(json.dumps(_look(*sys.argv[1:])))  # noqa: T201 - it is the answer
