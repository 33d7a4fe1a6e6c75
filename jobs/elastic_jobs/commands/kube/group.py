"""elastic kube: runs on Kubernetes with KubeRay."""

from __future__ import annotations

import argparse
from typing import Any

from elastic_jobs.command_parser import add_commands
from elastic_jobs.commands.kube import apply, delete, logs, render, status
from elastic_jobs.running.backend import Backend

HELP = "runs on Kubernetes with KubeRay: render, apply, status, logs, delete"
EXAMPLE = apply.EXAMPLE

_COMMANDS: dict[str, Any] = {
    "render": render,
    "apply": apply,
    "status": status,
    "logs": logs,
    "delete": delete,
}


def arguments(parser: argparse.ArgumentParser) -> None:
    add_commands(parser, _COMMANDS, dest="kube_command")


def run(options: argparse.Namespace, backend: Backend) -> int:
    return int(_COMMANDS[options.kube_command].run(options))
