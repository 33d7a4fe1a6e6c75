"""elastic kube: runs on Kubernetes with KubeRay."""

from __future__ import annotations

import argparse
from typing import Any

from elastic_jobs.commands.kube import apply, delete, logs, render, status
from elastic_jobs.exit_codes import TABLE
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
    commands = parser.add_subparsers(dest="kube_command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=module.HELP,
            description=f"{module.HELP[0].upper()}{module.HELP[1:]}.",
            epilog=f"example:\n  {module.EXAMPLE}\n\n{TABLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.arguments(sub)


def run(options: argparse.Namespace, backend: Backend) -> int:
    return int(_COMMANDS[options.kube_command].run(options))
