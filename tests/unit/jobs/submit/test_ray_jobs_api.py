"""Ray's Jobs client against a server that answers as Ray's own does, one that fails and one that goes away."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from elastic_jobs.submit.jobs_api import Unreachable
from elastic_jobs.submit.ray_jobs_api import RayJobsApi

VERSION = {"version": "4", "ray_version": "2.60.0", "ray_commit": "x", "session_name": "s"}


class Answers(ThreadingHTTPServer):
    """`paths` says what is answered where; anything else fails as a server of Ray does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.paths: dict[str, Any] = {"/api/version": VERSION}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Answers)
        known = self.server.paths.get(self.path.partition("?")[0])
        body = json.dumps(known).encode() if known is not None else b"Traceback ...\nConnectionRefusedError: its agent"
        self.send_response(200 if known is not None else 500)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Answers]:
    with Answers() as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def node(state: str = "ALIVE", **labels: str) -> dict[str, Any]:
    return {"state": state, "resources_total": {"CPU": 4.0}, "labels": {"ray.io/node-id": "1", **labels}}


OF_A_GROUP = {"ray.io/node-group": "headgroup"}
REPORT = {"autoscalerReport": {"availableNodeTypes": {"local.cluster.node": {}}}}


@pytest.mark.parametrize(
    ("status", "nodes", "autoscaling"),
    [
        # Version 1 says what it could start; one that only watches says this.
        (REPORT, [node(**OF_A_GROUP)], False),
        ({"autoscalerReport": {"availableNodeTypes": {"head": {}, "gpu": {}}}}, [node()], True),
        # Version 2 says nothing.
        (None, [node(**OF_A_GROUP)], True),
        (None, [node(), node("DEAD", **OF_A_GROUP)], False),
    ],
)
def test_whether_nodes_may_still_come(
    server: Answers, status: Mapping[str, Any] | None, nodes: list[dict[str, Any]], autoscaling: bool
) -> None:
    server.paths["/api/v0/nodes"] = {"data": {"result": {"result": nodes}}}
    server.paths["/api/cluster_status"] = {"data": {"clusterStatus": status}}
    found = RayJobsApi(server.address).cluster()
    assert found.autoscaling is autoscaling
    assert found.nodes == ({"CPU": 4.0},)


def test_a_log_that_is_gone_is_empty_and_one_of_a_server_that_is_away_is_not(server: Answers) -> None:
    api = RayJobsApi(server.address)
    assert list(api.tail("r-a1", 0, ended=True)) == [""]
    server.paths["/api/jobs/r-a1/logs"] = {"logs": "one\ntwo\n"}
    assert list(api.tail("r-a1", 4, ended=True)) == ["two\n"]
    server.shutdown()
    server.server_close()
    with pytest.raises(Unreachable, match="no Ray Jobs server answers"):
        list(api.tail("r-a1", 0, ended=True))
