"""The `elastic` command: subcommands, and errors as one sentence with a reliable exit code."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from elastic.core.errors import ElasticError
from elastic_jobs.command_parser import CommandParser, add_commands
from elastic_jobs.commands import completion, drain, export, resume, run, stop, submit
from elastic_jobs.commands.inspect import checkpoints, list_runs, logs, report, status, story, trace, watch, wire
from elastic_jobs.commands.kube import group
from elastic_jobs.commands.planning import laws, plan
from elastic_jobs.exit_codes import NOT_FINISHED, TABLE
from elastic_jobs.running.backend import Backend
from elastic_jobs.running.follow import printable
from elastic_jobs.terminal import put, say

if TYPE_CHECKING:
    from elastic_jobs.running.ray_backend import RayBackend

_COMMANDS: dict[str, Any] = {
    "run": run,
    "submit": submit,
    "list": list_runs,
    "status": status,
    "logs": logs,
    "resume": resume,
    "watch": watch,
    "drain": drain,
    "stop": stop,
    "story": story,
    "checkpoints": checkpoints,
    "export": export,
    "report": report,
    "trace": trace,
    "wire": wire,
    "plan": plan,
    "laws": laws,
    "kube": group,
    "completion": completion,
}


def main(arguments: Sequence[str] | None = None, backend: Backend | None = None) -> int:
    """Returns the exit code; the parser itself exits with 2 for unknown arguments."""
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.WARNING, format="%(name)s: %(message)s")
    quieten_drivers()
    if backend is not None:
        return _run(options, backend)
    real = _real()
    code = _run(options, real)
    if not real.leave():
        # Ray would wait for a lost cluster and end the process with an exit code of its own.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(options: argparse.Namespace, backend: Backend) -> int:
    try:
        return int(_COMMANDS[options.command].run(options, backend))
    except ElasticError as error:
        say(f"elastic {options.command}: {printable(str(error))}")
        return error.exit_code
    except KeyboardInterrupt:
        say(f"elastic {options.command}: interrupted")
        return NOT_FINISHED
    except BrokenPipeError:
        # The reader of the output has left (`elastic story RUN | head`). Python would report that again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_FINISHED


def parser() -> argparse.ArgumentParser:
    top = CommandParser(
        prog="elastic",
        description="A DeepSpeed ZeRO run that loses a node and carries on.",
        epilog=f"example:\n  {run.EXAMPLE}\n\n{TABLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action=_Version, help="print the releases of this package and what it runs on")
    top.add_argument("--verbose", action="store_true", help="show the log of all modules")
    add_commands(top, _COMMANDS, dest="command")
    # For `elastic completion`, which lists the words of all commands.
    top.set_defaults(parser=top)
    return top


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **more)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        names = ("ray", "torch", "deepspeed")
        put(f"ray-elastic {version('ray-elastic')} ({', '.join(f'{name} {version(name)}' for name in names)})")
        parser.exit()


def quieten_drivers() -> None:
    """Storage drivers log whole requests at level DEBUG, session tokens in headers included."""
    for name in ("botocore", "aiobotocore", "s3fs", "fsspec", "gcsfs", "adlfs", "urllib3", "aiohttp", "azure"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _real() -> RayBackend:
    from elastic_jobs.running.ray_backend import RayBackend

    return RayBackend()


if __name__ == "__main__":
    sys.exit(main())
