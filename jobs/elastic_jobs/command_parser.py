"""The parser of the `elastic` command: the nearest command or option for a typo, and words for shell completion."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elastic_jobs.exit_codes import TABLE

# The words of the command line up to here -> what may come next.
Words = dict[tuple[str, ...], list[str]]


class CommandParser(argparse.ArgumentParser):
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            names = list(action.choices)
            raise argparse.ArgumentError(None, f"unknown command {value!r}; {nearest(str(value), names)}")
        super()._check_value(action, value)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Exits with 2 for unknown arguments, and names the nearest option."""
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            used = self._used(options)
            flags = [flag for action in used._actions for flag in action.option_strings]
            unknown = rest[0].partition("=")[0]
            hint = f"; {nearest(unknown, flags)}" if unknown.startswith("-") else ""
            used.error(f"unknown argument {rest[0]!r}{hint}")
        return options

    def _used(self, options: argparse.Namespace) -> argparse.ArgumentParser:
        """The parser of the subcommand that was chosen."""
        parser: argparse.ArgumentParser = self
        while (group := _subcommands(parser)) is not None:
            parser = group.choices[getattr(options, group.dest)]
        return parser


def add_commands(parser: argparse.ArgumentParser, modules: Mapping[str, Any], dest: str) -> None:
    """A subcommand for each module: by name, with its HELP, EXAMPLE and `arguments`."""
    commands = parser.add_subparsers(dest=dest, required=True, metavar="COMMAND")
    for name, module in modules.items():
        sub = commands.add_parser(
            name,
            help=module.HELP,
            description=f"{module.HELP[0].upper()}{module.HELP[1:]}.",
            epilog=f"example:\n  {module.EXAMPLE}\n\n{TABLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.arguments(sub)


def nearest(word: str, known: Sequence[str]) -> str:
    """A clause for an error: the nearest known word, or all of them."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"


def words(parser: argparse.ArgumentParser) -> Words:
    """What may follow each command: its subcommands, else its options."""
    return dict(_words(parser, ()))


def _words(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    flags = [action.option_strings[-1] for action in parser._actions if action.option_strings]
    group = _subcommands(parser)
    yield path, [*(group.choices if group else ()), *flags]
    for name, below in (group.choices if group else {}).items():
        yield from _words(below, (*path, name))


def _subcommands(parser: argparse.ArgumentParser) -> Any:
    return next((action for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None)
