"""elastic kube: runs on Kubernetes with KubeRay."""

from __future__ import annotations

import argparse
from typing import Any

from jobs.backend import Backend
from jobs.commands import kube_apply, kube_delete, kube_logs, kube_render, kube_status
from jobs.exit_codes import TABLE

HELP = "runs on Kubernetes with KubeRay: render, apply, status, logs, delete"
EXAMPLE = kube_apply.EXAMPLE

_COMMANDS: dict[str, Any] = {
    "render": kube_render,
    "apply": kube_apply,
    "status": kube_status,
    "logs": kube_logs,
    "delete": kube_delete,
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
