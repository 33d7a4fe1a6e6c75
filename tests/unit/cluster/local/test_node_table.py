"""The parts of a cluster that need no Ray: its books, its words on the wire, its share of shared memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_cluster.json_lines import JsonLines
from elastic_cluster.local import features, leftovers, processes
from elastic_cluster.local.cluster import LocalCluster, object_store
from elastic_cluster.local.node_table import Entry, Nodes
from elastic_cluster.local.operations import Operations
from elastic_cluster.local.processes import Process
from elastic_cluster.source import ClusterEnded, ClusterError, NodeInfo, NodeState
from hypothesis import given
from hypothesis import strategies as st

_OPTIONS = {"num_cpus": 2, "num_gpus": 1, "resources": {"spot": 1}, "labels": {"zone": "a"}}
MB = 1024 * 1024


@pytest.fixture
def nodes() -> Nodes:
    books = Nodes("elc-test", os.getpid())
    for number in range(3):
        extra = {"_system_config": {}} if number == 0 else {}
        books.define(f"node-{number}", number == 0, {**_OPTIONS, **extra}).state = NodeState.ALIVE
    return books


class TestRevive:
    def test_takes_the_node_lost_longest(self, nodes: Nodes) -> None:
        nodes.lost(nodes.entries["node-2"])
        nodes.lost(nodes.entries["node-1"])
        assert [nodes.revive(None).name for _ in range(3)] == ["node-2", "node-1", "node-3"]

    def test_gives_a_new_life_with_a_tag_of_its_own(self, nodes: Nodes) -> None:
        entry = nodes.entries["node-1"]
        entry.node_id, entry.raylet_pid, entry.roots = "a", 7, (Process(7, 1, 1, "S", 1),)
        before = nodes.tag(entry)
        nodes.lost(entry)
        assert nodes.revive("node-1") is entry
        assert entry == Entry("node-1", False, _OPTIONS, NodeState.STARTING, lives=2, lost_at=1)
        assert nodes.tag(entry) != before

    def test_makes_a_node_like_the_others_and_never_a_head(self, nodes: Nodes) -> None:
        entry = nodes.revive("gpu-node")
        assert (entry.name, entry.head, entry.options) == ("gpu-node", False, _OPTIONS)

    def test_a_node_like_a_lone_head_leaves_out_what_only_a_head_takes(self) -> None:
        books = Nodes("elc-test", os.getpid())
        books.define("node-0", True, {**_OPTIONS, "_system_config": {}})
        assert books.revive(None).options == _OPTIONS

    def test_refuses_a_live_node_and_a_headless_cluster(self, nodes: Nodes) -> None:
        with pytest.raises(ClusterError, match="node-1 is alive; only a lost node can be brought back"):
            nodes.revive("node-1")
        nodes.lost(nodes.entries["node-0"])
        with pytest.raises(ClusterError, match="the head of the cluster was lost"):
            nodes.revive(None)


def test_only_a_running_node_can_be_struck(nodes: Nodes) -> None:
    with pytest.raises(ClusterError, match="no node 'node-9'; there are node-0, node-1, node-2"):
        nodes.running("node-9")
    nodes.lost(nodes.entries["node-1"])
    with pytest.raises(ClusterError, match="node-1 is lost"):
        nodes.running("node-1")


def test_a_process_of_no_node_is_refused(nodes: Nodes) -> None:
    with pytest.raises(ClusterError, match=f"process {os.getppid()} belongs to no node"):
        nodes.of_pid(os.getppid())


def test_a_node_reads_back_from_the_wire(nodes: Nodes) -> None:
    info = nodes.info(nodes.entries["node-0"], {3, 1})
    assert info.resources == {"CPU": 2, "GPU": 1, "spot": 1}
    assert info.pids == (1, 3)
    assert NodeInfo.from_json(info.to_json()) == info


@pytest.fixture
def ends() -> Iterator[tuple[JsonLines, JsonLines]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield JsonLines(ours), JsonLines(theirs)


class TestWire:
    def test_messages_arrive_one_by_one(self, ends: tuple[JsonLines, JsonLines]) -> None:
        here, there = ends
        here.send({"a": 1})
        here.send({"b": "x" * 200_000})
        assert there.receive(5.0, "a") == {"a": 1}
        assert there.receive(5.0, "b") == {"b": "x" * 200_000}

    def test_a_wait_names_what_it_waited_for(self, ends: tuple[JsonLines, JsonLines]) -> None:
        with pytest.raises(ClusterError, match=r"waited 0\.01 s for the moon"):
            ends[0].receive(0.01, "the moon")

    def test_the_end_is_told_from_silence(self, ends: tuple[JsonLines, JsonLines]) -> None:
        ends[1].connection.close()
        with pytest.raises(ClusterEnded, match="ended while waiting for the moon"):
            ends[0].receive(5.0, "the moon")

    def test_feed_takes_what_is_there(self, ends: tuple[JsonLines, JsonLines]) -> None:
        here, there = ends
        here.connection.sendall(b'{"a": 1}\n{"b"')
        assert there.feed() == ([{"a": 1}], False)
        here.connection.sendall(b": 2}\n")
        assert there.feed() == ([{"b": 2}], False)
        here.connection.sendall(b"no json\n")
        with pytest.raises(ValueError, match="Expecting value"):
            there.feed()
        here.connection.close()
        assert there.feed() == ([], True)


@given(st.integers(1, 64), st.integers(0, 10**10), st.integers(0, 10**11))
def test_object_stores_fit_into_shared_memory_or_stay_out_of_it(nodes: int, wanted: int, free: int) -> None:
    size, directory = object_store(nodes, wanted, free)
    assert size >= 75 * MB  # Ray refuses less.
    assert size <= max(wanted, 75 * MB)
    assert directory is not None or nodes * size <= free // 2


def test_the_default_of_docker_puts_object_stores_on_disk() -> None:
    assert object_store(4, 100 * MB, 64 * MB) == (100 * MB, "/tmp")
    assert object_store(4, 100 * MB, 24_000 * MB) == (100 * MB, None)
    assert object_store(4, 1_000 * MB, 4_000 * MB) == (500 * MB, None)


def test_a_cluster_needs_a_node() -> None:
    with pytest.raises(ValueError, match="at least one node, not 0"):
        LocalCluster.start(0)


def test_a_cluster_that_is_slow_to_end_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_cluster.local.cluster._END_LIMIT_S", 0.01)
    ours, theirs = socket.socketpair()
    with theirs:
        cluster = LocalCluster(ours, None)
        with pytest.raises(ClusterError, match="for the cluster to end"):
            cluster.shutdown()
        assert ours.fileno() < 0
        cluster.shutdown()


def test_nobody_answers_at_a_path_that_is_no_cluster(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"no cluster answers at .*keeper\.sock: No such file"):
        LocalCluster.attach(tmp_path / "keeper.sock")


class TestRemains:
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(leftovers, "_root", lambda: tmp_path)

    def test_only_the_directory_of_a_dead_keeper_is_cleared(self) -> None:
        own, living, dead, starting = (leftovers.private_directory() for _ in range(4))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(living / "keeper.sock"))
            listener.listen()
            with socket.socket(socket.AF_UNIX) as gone:
                gone.bind(str(dead / "keeper.sock"))
            leftovers.clear_remains(own)
        assert [path.exists() for path in (own, living, dead, starting)] == [True, True, False, True]

    def test_the_directory_is_private(self) -> None:
        assert leftovers.private_directory().stat().st_mode & 0o777 == 0o700


class TestFeatures:
    def test_a_token_is_in_a_file_of_its_owner_only_and_nowhere_else(self, tmp_path: Path) -> None:
        made = features.settings(["token"], tmp_path)
        file = features.token_file(tmp_path)
        assert made == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}
        assert file.stat().st_mode & 0o777 == 0o600
        assert len(bytes.fromhex(file.read_text())) == 32

    def test_no_two_clusters_have_one_token(self, tmp_path: Path) -> None:
        tokens = set()
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            features.settings(["token"], tmp_path / name)
            tokens.add(features.token_file(tmp_path / name).read_text())
        assert len(tokens) == 2

    def test_a_durable_control_store_is_kept_in_the_clusters_directory(self, tmp_path: Path) -> None:
        made = features.settings(["durable-control-store"], tmp_path)
        assert made["RAY_gcs_storage"] == "rocksdb"
        assert Path(made["RAY_gcs_storage_path"]).parent == tmp_path
        assert Path(made["RAY_gcs_storage_path"]).stat().st_mode & 0o777 == 0o700
        # Ray's own 60 s are less than a head may be away.
        assert int(made["RAY_gcs_rpc_server_reconnect_timeout_s"]) >= 300

    def test_without_features_nothing_is_set(self, tmp_path: Path) -> None:
        assert features.settings([], tmp_path) == {}
        assert list(tmp_path.iterdir()) == []

    def test_what_is_no_feature_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="there is no feature tokens"):
            features.settings(["tokens"], tmp_path)


class TestControlStore:
    @pytest.fixture
    def head(self, nodes: Nodes) -> Entry:
        own = processes.read(os.getpid())
        assert own is not None
        nodes.entries["node-0"].control_store = own
        return nodes.entries["node-0"]

    def test_one_that_is_not_kept_is_not_killed(self, nodes: Nodes, head: Entry) -> None:
        with pytest.raises(ClusterError, match="start it with durable_control_store=True"):
            Operations(nodes, lambda: None).kill_control_store()

    def test_one_that_runs_is_not_started_again(self, nodes: Nodes, head: Entry) -> None:
        operations = Operations(nodes, lambda: None)
        operations.check_control_store()
        with pytest.raises(ClusterError, match="only one that was killed can be started again"):
            operations.head_without_control_store()

    def test_while_it_is_away_no_node_is_added(self, nodes: Nodes, head: Entry) -> None:
        # Another process has its pid now.
        head.control_store = Process(os.getpid(), 1, 1, "S", 1)
        operations = Operations(nodes, lambda: None, [features.DURABLE])
        with pytest.raises(ClusterError, match="no node can join while the control store is away"):
            operations.check_control_store()
        with pytest.raises(ClusterError, match="away already"):
            operations.kill_control_store()
        assert operations.head_without_control_store() is head
        head.control_store_starting = True
        with pytest.raises(ClusterError, match="only one that was killed"):
            operations.head_without_control_store()

    def test_it_is_lost_with_the_head(self, nodes: Nodes, head: Entry) -> None:
        nodes.lost(head)
        with pytest.raises(ClusterError, match="no head that is alive"):
            Operations(nodes, lambda: None, [features.DURABLE]).kill_control_store()
