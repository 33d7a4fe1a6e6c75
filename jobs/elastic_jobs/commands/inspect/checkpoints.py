"""elastic checkpoints: the checkpoints that a run can be resumed from."""

from __future__ import annotations

import argparse
from typing import Any

from elastic.core.errors import IntegrityError
from elastic.core.wording import plural
from elastic.observe.text import clean, date, size, table
from elastic_jobs.commands.common import folder_of, run_arguments
from elastic_jobs.running.backend import Backend
from elastic_jobs.terminal import put, put_json, say

HELP = "list the complete checkpoints of a run, newest first"
EXAMPLE = "elastic checkpoints gpt-20260102-030405-ab12"


def arguments(parser: argparse.ArgumentParser) -> None:
    run_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")


def run(options: argparse.Namespace, backend: Backend) -> int:
    folder = folder_of(options)
    settings = folder.read_job().settings
    found = list_checkpoints(settings.checkpoint.url, folder.run_id)
    if not found:
        say(f"run {folder.run_id} has no complete checkpoint in {settings.checkpoint.url}")
    if options.json:
        for entry in found:
            put_json(entry)
    else:
        for line in table([_row(entry) for entry in found]):
            put(line)
    return 0


def list_checkpoints(url: str, run_id: str) -> list[dict[str, Any]]:
    """Newest first. A checkpoint whose manifest cannot be trusted is listed with its `problem`."""
    from elastic.checkpoint.storage import CheckpointStore

    store = CheckpointStore(url, run_id)
    entries: list[dict[str, Any]] = []
    for ref in store.list():
        entry: dict[str, Any] = {"id": ref.id, "step": ref.step, "generation": ref.generation}
        try:
            manifest = store.manifest(ref.id)
        except IntegrityError as error:
            entries.append({**entry, "problem": str(error)})
            continue
        sizes = [shard.bytes for shard in manifest.shards]
        entry |= {"world_size": manifest.world_size, "zero_stage": manifest.zero_stage, "bytes": sum(sizes)}
        entries.append({**entry, "written_at": manifest.written_at})
    return entries


def _row(entry: dict[str, Any]) -> dict[str, str]:
    world_size = entry.get("world_size")
    return {
        "checkpoint": entry["id"],
        "step": str(entry["step"]),
        "generation": str(entry["generation"]),
        "shards": "-" if world_size is None else plural(world_size, "rank"),
        "size": size(entry.get("bytes")),
        "written": date(entry["written_at"]) if entry.get("written_at") else "-",
        "problem": clean(entry.get("problem", "")),
    }
