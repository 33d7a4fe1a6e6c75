"""What the documents name exists: links, files, commands, flags, exit codes, job keys, faults, the README's diff."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from elastic_cluster.chaos import Action, Chaos
from elastic_jobs import exit_codes
from elastic_jobs.cli import parser
from elastic_jobs.job_file.load import parse_job
from elastic_jobs.job_file.sections import (
    AnomalySpec,
    AuditSpec,
    CalibrationSpec,
    CheckpointSpec,
    CommunicationSpec,
    GradientNoiseSpec,
    MeshSpec,
    SnapshotSpec,
    StragglerSpec,
)
from elastic_jobs.job_file.spec import JobSpec
from elastic_jobs.job_file.submit_section import SubmitSpec
from elastic_jobs.job_file.yaml_lines import parse
from pydantic_core import PydanticUndefined

from elastic.core import incident
from elastic.core.settings import FailureSettings
from elastic.engines.deepspeed.refused import REFUSED
from elastic.observe import time_ledger

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_ROW = re.compile(r"^\| `([\w-]+)` \| (.*?) \|", re.MULTILINE)

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


@documents
def test_links_lead_somewhere(document: Path) -> None:
    for link in _LINK.findall(prose(document)):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (document.parent / file).resolve() if file else document
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


@documents
def test_files_that_are_named_exist(document: Path) -> None:
    homes = [ROOT, ROOT / "elastic", ROOT / "elastic" / "core", ROOT / "elastic" / "training"]
    for code in inline(document):
        if re.fullmatch(r"[\w./-]*/[\w.-]+\.(py|yaml|json|toml|md|svg)|[\w-]+\.(toml|md)", code):
            assert any((home / code).exists() for home in homes), code


@documents
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in [*inline(document), *console(document)]:
        if line.startswith("make "):
            assert line.split()[1] in targets, line


@documents
def test_commands_are_understood(document: Path) -> None:
    for line in console(document):
        if line.startswith("elastic "):
            parser().parse_args(shlex.split(line)[1:])


@documents
def test_flags_and_subcommands_exist(document: Path) -> None:
    options, names = {flag for action in parser()._actions for flag in action.option_strings}, set()
    for name, sub in subcommands().items():
        names.add(name)
        options.update(option for action in actions(sub) for option in action.option_strings)
    for code in inline(document):
        assert set(re.findall(r"(?<!\S)--[a-z][\w-]*", code)) <= options | {"--chaos"}, code
        if code.startswith("elastic "):
            assert code.split()[1] in names | options, code


def test_every_subcommand_is_in_the_readme() -> None:
    named = {code.split()[1] for code in inline(ROOT / "README.md") if code.startswith("elastic ")}
    assert named == subcommands().keys()


def test_exit_codes() -> None:
    section = (ROOT / "README.md").read_text().partition("### Exit codes")[2]
    told = {int(code): what for code, what in re.findall(r"^\| (\d+) \| (.+?) \|$", section, re.MULTILINE)}
    listed = re.findall(r"(\d+) ((?:[a-z]+ ?)+)", exit_codes.TABLE.partition("\n")[2].replace("\n", "  "))
    assert told == {int(code): what.strip() for code, what in listed}
    assert told.keys() == {*exit_codes._CODES.values(), exit_codes.NOT_FOUND}


@pytest.mark.parametrize(
    ("section", "defaults"),
    [
        (
            "## Top level",
            {name: field.get_default(call_default_factory=True) for name, field in JobSpec.model_fields.items()},
        ),
        ("## mesh", {name: field.default for name, field in MeshSpec.model_fields.items()}),
        ("## checkpoint", {name: field.default for name, field in CheckpointSpec.model_fields.items()}),
        ("## snapshots", {name: field.default for name, field in SnapshotSpec.model_fields.items()}),
        ("## anomalies", {name: field.default for name, field in AnomalySpec.model_fields.items()}),
        ("## stragglers", {name: field.default for name, field in StragglerSpec.model_fields.items()}),
        ("## gradient_noise", {name: field.default for name, field in GradientNoiseSpec.model_fields.items()}),
        ("## communication", {name: field.default for name, field in CommunicationSpec.model_fields.items()}),
        ("## calibration", {name: field.default for name, field in CalibrationSpec.model_fields.items()}),
        ("## audit", {name: field.default for name, field in AuditSpec.model_fields.items()}),
        (
            "## submit",
            {name: field.get_default(call_default_factory=True) for name, field in SubmitSpec.model_fields.items()},
        ),
        ("## failures", {field.name: field.default for field in dataclasses.fields(FailureSettings)}),
    ],
    ids=lambda value: value.removeprefix("## ").split()[0].lower() if isinstance(value, str) else "",
)
def test_job_keys_and_their_defaults(section: str, defaults: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "job.md").read_text().partition(f"\n{section}\n")[2].partition("\n## ")[0]
    assert dict(_ROW.findall(text)) == {name: default(value) for name, value in defaults.items()}


@documents
def test_jobs_are_valid(document: Path) -> None:
    for text in fences(document, "yaml"):
        parse_job(parse(text, document.name), ROOT / "examples")


@documents
def test_json_is_json(document: Path) -> None:
    for text in fences(document, "json"):
        json.loads(text)


def test_the_incident_that_is_shown_has_the_fields_of_one() -> None:
    (shown,) = (json.loads(text) for text in fences(ROOT / "docs" / "failures.md", "json"))
    fields = {field.name for field in dataclasses.fields(incident.Incident)}
    assert (
        fields
        <= shown.keys()
        <= fields | {"seq", "incarnation", "time", "type", "run", "detector", "seconds", "restore"}
    )


def test_faults() -> None:
    text = (ROOT / "docs" / "failures.md").read_text().partition("## Fault injection")[2]
    assert set(dict(_ROW.findall(text))) >= {action.value for action in Action}
    for document in DOCUMENTS:
        for plan in re.findall(r'--chaos "([^"]+)"', document.read_text()):
            assert Chaos.parse(plan).faults


def test_owners_of_time() -> None:
    told = set(inline(ROOT / "docs" / "failures.md"))
    assert set(time_ledger.OWNERS) <= told


def test_refused_options() -> None:
    told = (ROOT / "docs" / "deepspeed.md").read_text()
    assert [path for path, _, _ in REFUSED if f"`{path}`" not in told] == []


def test_the_diff_in_the_readme_is_the_real_one() -> None:
    before, after = ((ROOT / "examples" / name).read_text().splitlines() for name in ("plain_deepspeed.py", "gpt.py"))
    lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
    # Less the docstrings of the modules, which name each other.
    code = [line for line in lines if line[1:].strip() and not re.match(r'@@|.("""|Compare)', line)]
    (shown,) = fences(ROOT / "README.md", "diff")
    assert shown.splitlines() == code
    assert len(code) <= 5


@documents
def test_calls_in_python_have_the_arguments_of_the_real_ones(document: Path) -> None:
    real = {
        "initialize": arguments(ROOT / "elastic" / "training" / "api.py", "initialize"),
        "ElasticTrainer": arguments(ROOT / "jobs" / "elastic_jobs" / "trainer.py", "__init__"),
    }
    for text in fences(document, "python"):
        for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name in real:
                assert {keyword.arg for keyword in call.keywords} <= real[name]


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name)
def test_pictures_are_xml_that_refers_to_nothing(picture: Path) -> None:
    ElementTree.parse(picture)
    assert not re.search(r"href|url\(|<script", picture.read_text())


def arguments(file: Path, function: str) -> set[str | None]:
    """Without importing it, which would import Ray or torch."""
    found = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef) and n.name == function]
    return {argument.arg for argument in [*found[0].args.args, *found[0].args.kwonlyargs]}


def fences(document: Path, language: str) -> list[str]:
    return [text for kind, text in _FENCE.findall(document.read_text()) if kind == language]


def prose(document: Path) -> str:
    return _FENCE.sub("", document.read_text())


def inline(document: Path) -> list[str]:
    return _CODE.findall(prose(document))


def console(document: Path) -> Iterator[str]:
    for text in fences(document, "console"):
        for line in text.splitlines():
            if line.startswith("$ "):
                yield line[2:]


def anchors(document: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def subcommands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(found.choices)


def actions(command: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Its own and those of the commands below it."""
    for action in command._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in set(action.choices.values()):
                yield from actions(below)


_SECTIONS = (
    AnomalySpec,
    AuditSpec,
    CalibrationSpec,
    CheckpointSpec,
    GradientNoiseSpec,
    MeshSpec,
    SnapshotSpec,
    StragglerSpec,
    SubmitSpec,
    FailureSettings,
)


def default(value: object) -> str:
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, _SECTIONS):
        return "see below"
    if value is None:
        return "none"
    if isinstance(value, dict):
        return "`{" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "}`"
    return f"`{json.dumps(value)}`"
