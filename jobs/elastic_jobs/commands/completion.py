"""elastic completion: a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse
import shlex

from elastic_jobs.command_parser import Words, words
from elastic_jobs.running.backend import Backend
from elastic_jobs.terminal import put

HELP = "print a script that completes this command in bash, zsh or fish"
EXAMPLE = """\
source <(elastic completion bash)
  elastic completion fish > ~/.config/fish/completions/elastic.fish"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(options: argparse.Namespace, backend: Backend) -> int:
    known = words(options.parser)
    put(_fish(known) if options.shell == "fish" else _bash(known, options.shell == "zsh"))
    return 0


def _bash(known: Words, zsh: bool) -> str:
    """One function for both: zsh runs bash's completions."""
    cases = "\n".join(
        f"    {shlex.quote(' '.join(path))}) next={shlex.quote(' '.join(found))} ;;" for path, found in known.items()
    )
    begin = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n" if zsh else ""
    return f"""{begin}_elastic() {{
  local path= next= word
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$word" in -*) break ;; esac
    case {_alternatives(known)} in *"|${{path:+$path }}$word|"*) path="${{path:+$path }}$word" ;; *) break ;; esac
  done
  case "$path" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$next" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _elastic elastic"""


def _alternatives(known: Words) -> str:
    return shlex.quote("|" + "|".join(" ".join(path) for path in known if path) + "|")


def _fish(known: Words) -> str:
    lines = ["complete -c elastic -f -n __fish_use_subcommand -a " + shlex.quote(" ".join(known[()]))]
    for path, found in known.items():
        if path:
            seen = "; and ".join(f"__fish_seen_subcommand_from {name}" for name in path)
            lines.append(f"complete -c elastic -n {shlex.quote(seen)} -a {shlex.quote(' '.join(found))}")
    return "\n".join(lines)
