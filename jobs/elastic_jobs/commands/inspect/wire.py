"""elastic wire: what the collectives of a run's steps move and cost."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from elastic.core.data.collectives import CollectiveUse
from elastic.core.errors import UsageError
from elastic.observe.steps import CollectiveTable, collective_table
from elastic.observe.text import brief, size, table
from elastic.planner.wire import advice, group_size, sent_bytes
from elastic_jobs.commands.common import history_of, run_arguments
from elastic_jobs.running.backend import Backend
from elastic_jobs.terminal import put, put_json

HELP = "print what the collectives of a run's steps move and cost"
EXAMPLE = "elastic wire gpt-20260102-030405-ab12"


def arguments(parser: argparse.ArgumentParser) -> None:
    run_arguments(parser)
    parser.add_argument("--generation", type=int, metavar="N", help="which generation (default: the newest)")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(options: argparse.Namespace, backend: Backend) -> int:
    folder, records = history_of(options)
    found = collective_table(records, options.generation)
    if found is None:
        which = "any generation" if options.generation is None else f"generation {options.generation}"
        raise UsageError(f"the journal of run {folder.run_id} has no collectives of {which}")
    told = advice(found.rows, found.world_size)
    if options.json:
        rows = [{**asdict(use), "sent_bytes": _sent(use, found)} for use in found.rows]
        put_json({**asdict(found), "rows": rows, "advice": told})
        return 0
    for line in _lines(found):
        put(line)
    for sentence in told:
        put(f"advice: {sentence}")
    return 0


def _lines(found: CollectiveTable) -> list[str]:
    seconds, waited = (
        sum(getattr(use, name) * found.share(use) for use in found.rows) for name in ("seconds", "waited_s")
    )
    sent = sum(_sent(use, found) * found.share(use) for use in found.rows)
    return [
        f"generation {found.generation}, {found.world_size} ranks, steps {found.first_step} to {found.last_step}: "
        "rank 0, medians of a step",
        *table([_row(use, found) for use in found.rows]),
        *(f"from step {step} on gradients travel by {travel}" for step, travel in found.travel),
        f"each rank sends about {size(sent)} per step of {brief(found.step_s)}; {brief(seconds)} in collectives, "
        f"{brief(waited)} of which the training thread waited",
    ]


def _row(use: CollectiveUse, found: CollectiveTable) -> dict[str, str]:
    return {
        "operation": use.op,
        "axis": use.axis,
        "dtype": use.dtype or "-",
        "calls": str(use.calls),
        "payload": size(use.bytes),
        "sent": size(_sent(use, found)),
        "time": brief(use.seconds),
        "waited": brief(use.waited_s),
        # Islands exchange what they have learnt every so many steps.
        **({"in": f"{found.share(use):.3g} of steps"} if found.shares else {}),
    }


def _sent(use: CollectiveUse, found: CollectiveTable) -> float:
    return sent_bytes(use, group_size(use, found.world_size))
