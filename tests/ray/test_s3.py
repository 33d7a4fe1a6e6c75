"""A run whose checkpoints and journal are in S3: a real server behind a proxy that throttles, and a killed node."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest

# The server and the proxy are those of the tests of storage.
import s3_proxy
import s3_server
from elastic_cluster import LocalCluster
from elastic_jobs.run_folder import RunFolder
from harness import Record, Run, wait_until
from s3_proxy import Proxy, Request, Trouble

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.errors import RunNotFound
from elastic.observe.journal import JournalReader
from elastic.store.open import open_objects

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with s3_server.s3_port() as port, s3_proxy.proxy_of(port) as made, pytest.MonkeyPatch.context() as patch:
        s3_server.use(patch, made.endpoint)
        yield made


@pytest.fixture(scope="module")
def nodes(proxy: Proxy) -> Iterator[LocalCluster]:
    environment = {**s3_server.CREDENTIALS, "AWS_ENDPOINT_URL": proxy.endpoint}
    yield from harness.module_cluster(4, cpus_per_node=1, environment=environment)


class S3Run(Run):
    """A run whose files are in S3. Its journal is read by one reader, which fetches each object once."""

    def __init__(self, cluster: LocalCluster, folder: Path, url: str, **options: Any) -> None:
        super().__init__(cluster, folder, **options)
        self.url = url
        checkpoint = replace(self.settings.checkpoint, url=url)
        self.settings = replace(self.settings, storage_url=url, checkpoint=checkpoint)
        self._reader = JournalReader(url, self.settings.run_id)

    def records(self, kind: str | None = None) -> list[Record]:
        try:
            return [record for record in self._reader.records() if kind is None or record["type"] == kind]
        except RunNotFound:
            return []


def test_a_killed_node_is_recovered_from_s3(cluster: LocalCluster, proxy: Proxy, tmp_path: Path) -> None:
    s3_server.make_bucket("training")
    run = S3Run(cluster, tmp_path, "s3://training/team/runs", epochs=1)
    throttled: list[str] = []
    numbers, reads = itertools.count(1), itertools.count(1)

    def some(request: Request) -> Trouble | None:
        # Every second read of a checkpoint, so that a restore meets it for certain, and every seventh of all else.
        reading = request.operation == "GetObject" and "/checkpoints/" in request.path
        if next(reads) % 2 if reading else next(numbers) % 7:
            return None
        throttled.append(request.operation)
        return Trouble.SLOW_DOWN

    proxy.decide = some
    run.allow(7)
    run.start()
    run.reach(7)
    run.wait_checkpoint(5)
    _restart_without_storage(run, cluster, proxy)
    lost = run.node_of(run.away_from_head()[-1])
    cluster.kill_node(lost.name)
    run.wait_generation(2)
    assert run.handle.progress()["world_size"] == 3
    result = run.finish()
    assert result["step"] == 13
    run.assert_whole()
    assert run.summary()["controllers"] == 2
    (incident,) = (i for i in run.incidents() if not i["planned"])
    assert (incident["source"], incident["lost_nodes"]) == ("storage", [lost.node_id])
    assert (incident["step"], incident["resumed_step"], incident["steps_repeated"]) == (7, 5, 2)
    assert throttled
    proxy.decide = s3_proxy.fine
    texts = [text for _, text in RunFolder(run.url, "run").texts("logs")]
    assert sum(f"--- generation 2, rank {rank} of 3 ---" in text for text in texts for rank in range(3)) == 3

    store = CheckpointStore(run.url, "run")
    newest = store.manifest(store.list()[0].id)
    assert newest.step == 13
    assert store.verify_shards(newest) == sum(shard.bytes for shard in newest.shards)
    assert store.incomplete() == ()
    assert_no_secret_is_kept(run, cluster)


def _restart_without_storage(run: S3Run, cluster: LocalCluster, proxy: Proxy) -> None:
    """The next controller finds its journal as soon as it can be read; the workers wait for it meanwhile."""
    some, refused = proxy.decide, list[str]()

    def nothing(request: Request) -> Trouble:
        refused.append(request.operation)
        return Trouble.SLOW_DOWN

    proxy.decide = nothing
    try:
        cluster.kill_process(run.handle.progress()["controller_pid"])
        # More than one request is asked again by itself, so that it has been given up at least once.
        wait_until(lambda: len(refused) > 15, "the next controller to ask in vain")
    finally:
        proxy.decide = some
    wait_until(lambda: any("has taken over after a restart" in s for s in run.decisions()), "the takeover")


def assert_no_secret_is_kept(run: Run, cluster: LocalCluster) -> None:
    """Neither in storage, where the journal is, nor in any log of the cluster."""
    secret = s3_server.CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode()
    objects = open_objects(run.url)
    kept = [path for path in objects.sizes("") if not path.endswith(".safetensors")]
    assert any("/journal/" in path for path in kept)
    assert [path for path in kept if secret in objects.get(path)] == []
    logs = [path for path in cluster.directory.rglob("*") if path.suffix in (".log", ".out", ".err")]
    assert logs
    assert [path for path in logs if secret in path.read_bytes()] == []
