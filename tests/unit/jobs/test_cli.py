"""The command line itself: help, exit codes, typing errors, completion."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from cli_fakes import FakeBackend
from elastic_jobs import cli

import elastic


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["run"], ["run", "a", "--nodes", "0"], ["run", "a", "--nodes", "x"]]
)
def test_bad_arguments_are_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments, FakeBackend())
    assert caught.value.code == 2


@pytest.mark.parametrize("command", ["run", "resume", "watch", "stop", "story", "checkpoints"])
def test_help_has_an_example_and_the_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert f"example:\n  elastic {command} " in text
    assert "105 no capacity" in text


def exits(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(words), FakeBackend())
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_version_and_what_it_runs_on(capfd: pytest.CaptureFixture[str]) -> None:
    assert exits("--version") == 0
    out = capfd.readouterr().out
    assert out.startswith(f"ray-elastic {elastic.__version__} (ray ")
    assert "deepspeed" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sumbit"], "unknown command 'sumbit'; did you mean 'submit'?"),
        (["kube", "rendr"], "unknown command 'rendr'; did you mean 'render'?"),
        (["xyzzy"], "unknown command 'xyzzy'; there are run, submit,"),
        (["run", "job.yaml", "--noodes", "3"], "unknown argument '--noodes'; did you mean '--nodes'?"),
        (
            ["kube", "render", "job.yaml", "--namespce=x"],
            "unknown argument '--namespce=x'; did you mean '--namespace'?",
        ),
        (["run", "job.yaml", "more"], "elastic run: error: unknown argument 'more'\n"),
    ],
)
def test_a_typo_gets_the_nearest_word(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert exits(*words) == 2
    assert said in capfd.readouterr().err


def completed(script: str, shell: str, *words: str) -> set[str]:
    line = " ".join(words)
    ask = f"COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); _elastic; echo ${{COMPREPLY[@]}}"
    done = subprocess.run([shell, "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_bash_completes_commands_and_options(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"], FakeBackend()) == 0
    script = capfd.readouterr().out
    assert completed(script, "bash", "elastic", "re") == {"resume", "report"}
    assert completed(script, "bash", "elastic", "kube", "rend") == {"render"}
    assert {"--nodes", "--node-every"} == completed(script, "bash", "elastic", "run", "--no")
    assert completed(script, "bash", "elastic", "run", "job.yaml", "--nodes", "3", "--cha") == {"--chaos"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_that_they_can_read(shell: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell], FakeBackend()) == 0
    script = capfd.readouterr().out
    assert "resume" in script
    assert "--node-every" in script
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=script, text=True, timeout=60, check=True)
