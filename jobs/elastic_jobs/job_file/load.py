"""Reading a job file: YAML, old names, relative paths. Errors name the line, the key and the nearest valid key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from elastic.core.errors import UsageError
from elastic.core.settings import (
    FailureSettings,
)
from elastic_jobs.job_file import kubernetes_section
from elastic_jobs.job_file.sections import (
    AnomalySpec,
    AuditSpec,
    BatchSpec,
    CalibrationSpec,
    CheckpointSpec,
    CommunicationSpec,
    GradientNoiseSpec,
    SinkSpec,
    SnapshotSpec,
    StragglerSpec,
    WeightsSpec,
)
from elastic_jobs.job_file.spec import JobSpec
from elastic_jobs.job_file.submit_section import SubmitSpec
from elastic_jobs.job_file.validation_messages import sentence
from elastic_jobs.job_file.yaml_lines import Document, parse
from elastic_jobs.run_folder import absolute_url
from elastic_jobs.terminal import say

# Old section -> present one. Both are read for one release.
_RENAMED = {"memory": "snapshots"}


def load_job(
    file: str | Path,
    *,
    storage_url: str | None = None,
    weights: Mapping[str, Any] | None = None,
    max_steps: int | None = None,
) -> JobSpec:
    """The job in `file`, with relative paths and URLs resolved against its folder. Raises UsageError.

    The other arguments are the command line's, and take the place of the file's keys: `storage_url` is relative to the
    working directory, `max_steps` takes the place of `epochs` too.
    """
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"job file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"job file {path} is not UTF-8 text") from error
    given: dict[str, Any] = {"weights": weights, "max_steps": max_steps}
    if storage_url is not None:
        given["storage_url"] = absolute_url(storage_url, ".")
    return parse_job(parse(text, str(path)), path.absolute().parent, given)


def parse_job(document: Document, folder: Path, given: Mapping[str, Any] | None = None) -> JobSpec:
    """`given`: values that take the place of the document's; None is no value.

    Raises UsageError naming the place, the key, and the nearest valid key where one is unknown.
    """
    if not isinstance(document.data, dict):
        raise UsageError(f"{document.name}: a job is a mapping of keys to values; see examples/gpt.yaml")
    document = _replaced(_with_present_names(document), given or {})
    try:
        spec = JobSpec.model_validate(document.data)
    except ValidationError as error:
        raise UsageError(sentence(error, document, _keys())) from error
    return _resolve(spec, document, folder)


def _with_present_names(document: Document) -> Document:
    """The document with old names of sections replaced, and one warning for each. Raises UsageError."""
    data, lines = dict(document.data), dict(document.lines)
    for old, new in _RENAMED.items():
        if old not in data:
            continue
        place = document.place([old])
        if new in data:
            raise UsageError(f"{place}: {old!r} is the old name of {new!r}, and both are given; keep {new!r}")
        say(f"{place}: {old!r} is now called {new!r}; the old name will be refused in the next release")
        data[new] = data.pop(old)
        lines.update({(new, *path[1:]): line for path, line in document.lines.items() if path[0] == old})
    return Document(document.name, data, lines)


def _replaced(document: Document, given: Mapping[str, Any]) -> Document:
    values = {key: value for key, value in given.items() if value is not None}
    epochs = document.data.get("epochs")
    if "max_steps" in values and epochs is not None:
        # A run has one end.
        values["epochs"] = None
        say(f"--max-steps {values['max_steps']} takes the place of the job's `epochs: {epochs}`")
    return replace(document, data={**document.data, **values})


def _keys() -> dict[tuple[str, ...], list[str]]:
    """The valid keys of each section."""
    return {
        (): list(JobSpec.model_fields),
        ("checkpoint",): list(CheckpointSpec.model_fields),
        ("snapshots",): list(SnapshotSpec.model_fields),
        ("anomalies",): list(AnomalySpec.model_fields),
        ("stragglers",): list(StragglerSpec.model_fields),
        ("gradient_noise",): list(GradientNoiseSpec.model_fields),
        ("audit",): list(AuditSpec.model_fields),
        ("calibration",): list(CalibrationSpec.model_fields),
        ("batch",): list(BatchSpec.model_fields),
        ("communication",): list(CommunicationSpec.model_fields),
        ("weights",): list(WeightsSpec.model_fields),
        ("sinks",): list(SinkSpec.model_fields),
        ("submit",): list(SubmitSpec.model_fields),
        ("failures",): [f.name for f in dataclasses.fields(FailureSettings)],
        **kubernetes_section.keys(),
    }


def _resolve(spec: JobSpec, document: Document, folder: Path) -> JobSpec:
    deepspeed = spec.deepspeed
    if isinstance(deepspeed, str):
        deepspeed = _read_deepspeed(folder / Path(deepspeed).expanduser(), document.place(["deepspeed"]))
    checkpoint = spec.checkpoint
    if checkpoint.url is not None:
        checkpoint = checkpoint.model_copy(update={"url": absolute_url(checkpoint.url, folder)})
    storage = absolute_url(spec.storage_url, folder) if spec.storage_url is not None else None
    weights = spec.weights
    if weights is not None:
        weights = weights.model_copy(update={"source": absolute_url(weights.source, folder)})
    changes = {"deepspeed": deepspeed, "checkpoint": checkpoint, "storage_url": storage, "weights": weights}
    return spec.model_copy(update=changes)


def _read_deepspeed(path: Path, place: str) -> dict[str, Any]:
    try:
        # JSON is YAML, so one parser gives line numbers for both.
        data = parse(path.read_text(encoding="utf-8"), str(path)).data
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{place}: the DeepSpeed config {path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{place}: the DeepSpeed config {path} is not a JSON object")
    return data
