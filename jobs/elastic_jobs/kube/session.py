"""Shared by the subcommands of `elastic kube`: the connection, and Kubernetes' errors and states as the project's."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_cluster.kube.client import status as words
from elastic_cluster.kube.client.api import Cluster
from elastic_cluster.kube.client.errors import KubeError, KubeNotFound, KubeQuota, KubeRefused
from elastic_cluster.kube.client.status import RunStatus

from elastic.core.errors import ElasticError, NoCapacity, RunNotFound, UsageError
from elastic.core.run import phase
from elastic_jobs.exit_codes import NOT_FINISHED, exit_code

# The exit codes of a run's driver; any other code comes from elsewhere.
_OURS = {2, 100, 101, 103, 104, 105, 106}
_NO_CAPACITY = "PreRunningDeadlineExceeded"


def place_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--namespace", metavar="NS", help="namespace (default: that of the context)")
    parser.add_argument("--context", metavar="C", help="context of the kubeconfig (default: the current one)")


@contextmanager
def connected(options: argparse.Namespace) -> Iterator[tuple[Cluster, str]]:
    """The cluster, and the chosen namespace. A KubeError in the block is raised as an ElasticError."""
    try:
        # Late: the client is an extra, and importing it takes a while.
        from elastic_cluster.kube.client.connect import connect
    except ImportError as error:
        raise UsageError("the Kubernetes client is not installed: pip install 'ray-elastic[kube]'") from error
    try:
        client = connect(options.context)
        try:
            yield client, options.namespace or client.namespace
        finally:
            client.close()
    except KubeError as error:
        raise translated(error) from error


def translated(error: KubeError) -> ElasticError:
    match error:
        case KubeNotFound():
            return RunNotFound(str(error))
        case KubeQuota():
            return NoCapacity(str(error))
        case KubeRefused():
            return UsageError(str(error))
        case _:
            return ElasticError(str(error))


def result(status: RunStatus) -> int:
    """The run's exit code, as far as Kubernetes reports it: the driver's own if Ray has kept it; 0 only for a finished
    run."""
    match status.state:
        case words.FINISHED:
            return exit_code(phase.FINISHED)
        case words.STOPPED:
            return exit_code(phase.STOPPED)
        case words.REFUSED:
            return exit_code(phase.USAGE)
        case words.FAILED if status.exit_code in _OURS:
            return int(status.exit_code or NOT_FINISHED)
        case words.FAILED if status.reason.startswith(_NO_CAPACITY):
            return exit_code(phase.NO_CAPACITY)
        case _:
            return NOT_FINISHED


def command(options: argparse.Namespace, *words: str) -> str:
    """A command in the same namespace and context: "elastic kube logs gpt -f --namespace team"."""
    place = ["--namespace", options.namespace] if options.namespace else []
    context = ["--context", options.context] if options.context else []
    return shlex.join(["elastic", "kube", *words, *place, *context])
