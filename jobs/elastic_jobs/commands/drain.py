"""elastic drain: give the cluster notice that a node is about to end."""

from __future__ import annotations

import argparse

from elastic_cluster.draining import drain
from elastic_cluster.source import ClusterError

from elastic.core.errors import RunNotFound, UsageError
from elastic_jobs.commands.common import storage_argument
from elastic_jobs.run_folder import RunFolder, default_storage
from elastic_jobs.running.backend import Backend
from elastic_jobs.running.live import read_live
from elastic_jobs.terminal import put_json, say
from elastic_jobs.trust import check_address, trust_argument

HELP = "give the cluster notice that a node is about to end"
EXAMPLE = "elastic drain 10.0.0.7 --run gpt-20260102-030405-ab12 --notice 120"

_NOTICE_S = 120.0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE", help="the node's name, its address, or the beginning of its id")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--run", metavar="RUN", help="the cluster of this run")
    where.add_argument("--address", metavar="A", help="the Ray cluster at this address (host:port)")
    storage_argument(parser)
    trust_argument(parser)
    parser.add_argument(
        "--notice", type=float, default=_NOTICE_S, metavar="S",
        help=f"seconds until the node is gone (default {_NOTICE_S:.0f})",
    )  # fmt: skip
    parser.add_argument("--why", default="asked for by `elastic drain`", metavar="TEXT", help="goes to Ray's log")
    parser.add_argument("--json", action="store_true", help="print the node and its notice as JSON")


def run(options: argparse.Namespace, backend: Backend) -> int:
    if not 0 < options.notice < float("inf"):
        raise UsageError(f"--notice {options.notice:g}: a node needs some seconds to leave in good order")
    address = options.address or _address_of(
        RunFolder(default_storage(options.storage), options.run), options.trust_storage
    )
    try:
        node = drain(address, options.node, options.notice, options.why)
    except ClusterError as error:
        raise UsageError(str(error)) from error
    if options.json:
        put_json({"node": node.node_id, "name": node.name, "notice_s": options.notice})
    say(f"node {node.name} ({node.node_id[:8]}) is about to go, in {options.notice:.0f} s: nothing new is put on it")
    if options.run:
        say(f"see how the run leaves it:  elastic watch {options.run}")
    return 0


def _address_of(folder: RunFolder, trusted: bool) -> str:
    live = read_live(folder)
    if live is None:
        raise RunNotFound(f"run {folder.run_id!r} is not running; name its cluster with --address")
    check_address(folder.run_id, live.address, live.cluster_socket, trusted or folder.signed)
    return live.address
