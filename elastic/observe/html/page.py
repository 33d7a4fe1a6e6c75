"""From a journal's records to the page: results, curves, incidents with their causes, configuration.

Everything on the page comes from the journal or from the job as it was started, escaped; nothing is guessed. A run that
is in progress is shown up to the end of its journal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from elastic.core.secrets import HIDDEN, is_secret_name, redact
from elastic.core.wording import plural
from elastic.observe.html import figures
from elastic.observe.html.style import STYLE
from elastic.observe.steps import collective_table
from elastic.observe.summary import summarize
from elastic.observe.text import (
    brief,
    clean,
    date,
    duration,
    finite,
    mesh_words,
    number,
    origin,
    size,
    step_range,
    world_change,
)

Record = Mapping[str, Any]
Summary = Mapping[str, Any]

# Tables are cut to keep the file small; the number of omitted rows is shown.
_MOST_ROWS = 200


def page(records: Sequence[Record], job: Mapping[str, Any] | None = None, watts: float | None = None) -> str:
    """The whole document. `job` is the job as it was started; secrets in it are not shown. `watts`: the power of one
    accelerator, from which the energy is estimated where no device has told it."""
    summary = summarize(records, watts)
    steps = _steps(records, summary)
    sections = [
        *_head(summary),
        _section("Loss", figures.losses(steps, summary) + _loss_key(summary) if steps else ""),
        _section("World size and throughput", figures.throughput(steps, summary) if steps else ""),
        _section("Incidents", figures.incidents(summary) + _phase_key(summary) + _incident_table(summary)),
        _section("Where the time went", _ledger(summary)),
        _section("Collectives", _collectives(records)),
        _section("Compute", _compute(summary, watts)),
        _section("Gradient noise", _noise(summary)),
        _section("Generations", _generation_table(summary)),
        _section("Checkpoints", _checkpoint_table(summary)),
        _section("Slowest ranks", _stragglers(steps)),
        _section("Error of the training function", _error(summary)),
        _section("Configuration", _configuration(job)),
    ]
    return document(f"{summary['run_id'] or 'run'}: elastic report", "\n".join(filter(None, sections)))


def document(title: str, body: str, style: str = STYLE) -> str:
    """A whole page of `body`, which is HTML already."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # The page loads and executes nothing, whatever texts the run contains.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>{body}</main></body></html>\n"
    )


def _steps(records: Sequence[Record], summary: Summary) -> list[dict[str, Any]]:
    """Finished steps in the order of the journal, each with the world size of its generation."""
    sizes = {generation["number"]: generation["world_size"] for generation in summary["generations"]}
    return [
        {**step, "world_size": sizes.get(step.get("generation"))}
        for record in records
        if record.get("type") == "steps"
        for step in record.get("steps") or ()
        if finite(step.get("step")) is not None and finite(step.get("time")) is not None and "generation" in step
    ]


def _head(summary: Summary) -> Iterator[str]:
    status = str(summary["status"])
    tone = "good" if status == "finished" else "faint" if status in ("running", "unknown") else "bad"
    yield f"<h1>{escape(clean(summary['run_id'] or 'run'))}</h1>"
    began = finite(summary["started_at"])
    when = f", started {date(began)}" if began is not None else ""
    yield f'<p><span class="{tone}">{escape(status)}</span><span class="faint">{when}</span></p>'
    if summary.get("reason"):
        yield f"<p>{escape(clean(summary['reason']))}</p>"
    samples = summary["samples"]
    unplanned = [incident for incident in summary["incidents"] if not incident["planned"]]
    tiles = [
        ("steps", f"{summary['steps']:,}" if summary["steps"] is not None else "-"),
        ("last loss", number(summary["final_loss"])),
        ("wall time", duration(summary["wall_s"])),
        ("failures", str(len(unplanned))),
        ("planned changes", str(len(summary["incidents"]) - len(unplanned))),
        ("samples seen", f"{samples['seen']:,}" if samples["seen"] is not None else "-"),
        ("missing, repeated", f"{samples['missing']}, {samples['repeated']}" if samples["seen"] is not None else "-"),
    ]
    shown = "".join(f"<li><b>{escape(value)}</b><span>{escape(name)}</span></li>" for name, value in tiles)
    yield f'<ul class="tiles">{shown}</ul>'


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _loss_key(summary: Summary) -> str:
    repeated = sum(incident["steps_repeated"] or 0 for incident in summary["incidents"])
    return (
        '<p class="faint">Bands are generations. Dashed vertical lines: failures (red) and planned changes (green). '
        f"Dashed curve: the first version of steps that were done again ({plural(repeated, 'step')} in all).</p>"
    )


def _phase_key(summary: Summary) -> str:
    if not summary["incidents"]:
        return "<p>None.</p>"
    keys = "".join(f'<span class="key" style="background:var(--p{n})"></span>{escape(words)}' for n, words in _PHASES)
    return f'<p class="faint">{keys}</p>'


_PHASES = tuple(enumerate(figures.PHASES.values(), start=1))


def _incident_table(summary: Summary) -> str:
    rows = [
        (
            str(incident["id"]),
            incident["kind"],
            incident["lost"] or "-",
            world_change(incident["world_size"], incident["next_world_size"]),
            "-" if incident["steps_repeated"] is None else str(incident["steps_repeated"]),
            origin(incident["source"], incident.get("bytes_from")),
            f"{incident['evidence']}{'; ' if incident['action'] else ''}{incident['action']}",
        )
        for incident in summary["incidents"]
    ]
    return _table(("", "what", "lost", "workers", "steps repeated", "state from", "cause and decision"), rows)


def _ledger(summary: Summary) -> str:
    ledger = summary["time_ledger"]
    total = sum(ledger.values())
    owners = sorted(ledger.items(), key=lambda item: -item[1])
    rows = [(owner, duration(seconds), f"{seconds / total:.1%}") for owner, seconds in owners if seconds > 0]
    return figures.time_ledger(ledger) + _table(("owner", "time", "share"), rows) if rows else ""


def _collectives(records: Sequence[Record]) -> str:
    """Of the newest generation that has any."""
    found = collective_table(records)
    if found is None:
        return ""
    rows = [
        (
            use.op,
            use.axis,
            use.dtype or "-",
            str(use.calls),
            size(use.bytes),
            brief(use.seconds),
            brief(use.waited_s),
            f"{found.share(use):.3g}",
        )
        for use in found.rows
    ]
    words = (
        f"Generation {found.generation}, {plural(found.world_size, 'rank')}: rank 0 in the median of steps "
        f"{found.first_step} to {found.last_step}, of {brief(found.step_s)}."
    )
    names = ("operation", "axis", "dtype", "calls", "payload", "time", "waited", "share of steps")
    return f'<p class="faint">{escape(words)}</p>' + _table(names, rows)


def _compute(summary: Summary, watts: float | None) -> str:
    compute = summary["compute"] or {"accelerator_s": {}, "sentences": [], "energy_j": None, "watts": None}
    unused = ""
    if watts is not None and compute["watts"] is None:
        why = (
            "the devices have told it" if compute["energy_j"] is not None else "accelerator-hours come with a run's end"
        )
        unused = f'<p class="faint">No energy is estimated from {watts:g} W: {escape(why)}.</p>'
    held = compute["accelerator_s"]
    total = sum(held.values())
    owners = sorted(held.items(), key=lambda item: -item[1])
    rows = [(owner, f"{value / 3600:.3g}", f"{value / total:.1%}") for owner, value in owners if value > 0]
    said = "".join(f"<p>{escape(sentence)}.</p>" for sentence in compute["sentences"])
    return said + unused + _table(("owner", "accelerator-hours", "share"), rows)


def _noise(summary: Summary) -> str:
    noise = summary["gradient_noise"]
    if not noise:
        return ""
    words = (
        f"Averages over {plural(noise['measured'], 'measured step')} up to step {noise['step']}: squared norm of the "
        f"gradient {number(noise['gradient'])}, trace of the samples' covariance {number(noise['noise'])}. Their ratio "
        "is a proxy for the batch beyond which more samples per step save few steps. Advice: the batch and the "
        "learning rate stay as the job says."
    )
    return f'<p>{escape(noise["advice"])}.</p><p class="faint">{escape(words)}</p>'


def _generation_table(summary: Summary) -> str:
    rows = [
        (
            str(item["number"]),
            ", ".join(filter(None, (str(item["world_size"] or "-"), mesh_words(item.get("mesh"))))),
            step_range(item["first_step"], item["last_step"]),
        )
        for item in summary["generations"]
    ]
    return _table(("generation", "workers", "steps"), rows)


def _checkpoint_table(summary: Summary) -> str:
    rows = [
        (item["id"], str(item["step"]), size(item["bytes"]), duration(item["seconds"]), duration(item["stall_s"]))
        for item in summary["checkpoints"]
    ]
    return _table(("checkpoint", "step", "size", "written in", "training waited"), rows)


def _stragglers(steps: Sequence[Mapping[str, Any]]) -> str:
    """How much longer the slowest rank worked than the median of its step."""
    excess = sorted(value for step in steps if (value := finite(step.get("straggler_s"))) is not None)
    if not excess or not excess[-1]:
        return ""
    median, worst = excess[len(excess) // 2], excess[-1]
    return (
        f"<p>In the median step the slowest rank worked {duration(median)} longer than the median rank; "
        f"{duration(worst)} in the worst step.</p>"
    )


def _error(summary: Summary) -> str:
    error = summary["error"]
    if not error:
        return ""
    where = f"worker {error['worker']}, step {error['step']}, generation {error['generation']}"
    trace = f"<pre>{escape(str(error['traceback']))}</pre>" if error.get("traceback") else ""
    return f"<p>{escape(where)}: {escape(clean(error['error']))}</p>{trace}"


def _configuration(job: Mapping[str, Any] | None) -> str:
    return f"<pre>{escape(json.dumps(_without_secrets(job), indent=2, default=str))}</pre>" if job else ""


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: HIDDEN if is_secret_name(str(key)) else _without_secrets(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_secrets(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(clean(value))}</td>" for value in row) + "</tr>" for row in rows[-_MOST_ROWS:]
    )
    left_out = len(rows) - _MOST_ROWS
    note = f'<p class="faint">The first {plural(left_out, "row")} left out.</p>' if left_out > 0 else ""
    return f'{note}<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
