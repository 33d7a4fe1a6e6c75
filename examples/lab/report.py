"""What the lab prints: predictions next to what was measured, as lines of text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from elastic.core.data.collectives import CollectiveUse
from elastic.observe.records import begins_generation, steps_of
from elastic.observe.steps import collective_table
from elastic.observe.text import brief, size, table
from elastic.planner.links import Link, fit_link, steps
from elastic.planner.model_shape import Tensors
from elastic.planner.states import FP32_ADAM, state_bytes
from elastic.planner.wire import sent_bytes
from lab import costs

Record = Mapping[str, Any]
Times = Mapping[str, Mapping[int, Sequence[float]]]

# Below it a reduction is no bucket of gradients but their norm.
_BUCKET_BYTES = 64
GATHERS = "all_gather_into_tensor"


def fitted(pair: Mapping[int, Sequence[float]]) -> Link:
    """alpha and beta of one message, from the best time of each size."""
    return fit_link("send", 2, [(size_bytes, min(seconds)) for size_bytes, seconds in pair.items()], knee=1.0)


def predictions(ranks: int, per_node: int, size_bytes: float) -> dict[str, costs.Cost]:
    return {
        "ring": costs.ring(ranks, size_bytes),
        "tree": costs.tree(ranks, size_bytes),
        "hierarchical": costs.hierarchical(ranks, per_node, size_bytes),
    }


def all_reduce(measured: Times, link: Link, ranks: int, per_node: int) -> Iterator[str]:
    """`measured`: what `lab.allreduce.times` gives."""
    yield (
        f"one message: alpha {brief(link.alpha_s)}, beta {link.beta_s_per_byte * 1e9:.2f} ns per byte "
        f"({1e-6 / link.beta_s_per_byte:.0f} MB/s): the best times of messages in pairs, {ranks // 2} pairs at once"
    )
    rows = []
    for size_bytes in measured["pair"]:
        for name, cost in predictions(ranks, per_node, size_bytes).items():
            predicted, seconds = link.seconds(cost.messages, cost.bytes), measured[name][size_bytes]
            rows.append(
                {
                    "size": size(size_bytes),
                    "algorithm": name,
                    "messages": f"{cost.messages:g}",
                    "bytes": size(cost.bytes),
                    "predicted": brief(predicted),
                    "best": brief(min(seconds)),
                    "median": brief(median(seconds)),
                    "best / predicted": f"{min(seconds) / predicted:.2f}",
                }
            )
        best, middle = min(measured["gloo"][size_bytes]), median(measured["gloo"][size_bytes])
        blank = dict.fromkeys(("messages", "bytes", "predicted", "best / predicted"), "-")
        rows.append({**rows[-1], **blank, "algorithm": "gloo's own", "best": brief(best), "median": brief(middle)})
    yield from table(rows)


def synchronisation(line: Record, elements: int) -> Iterator[str]:
    """The collectives of one step in their order, as rank 0 saw them: all-gathers of one pass together, buckets of
    gradients one by one, each when it was ready. `elements`: those of the whole gradient."""
    phases, calls = line["phases"], sorted(line["calls"], key=lambda call: float(call["began_s"]))
    yield (
        f"step {line['step']} on {line['world_size']} ranks, as rank 0 saw it: {brief(phases[-1][2])}, "
        f"{len(phases) // 3} micro-batches"
    )
    rows = []
    for number, (name, began_s, ended_s) in enumerate(phases):
        inside = [call for call in calls if began_s <= call["began_s"] < ended_s]
        reduced = 0
        for gathers, group in groupby(inside, key=lambda call: bool(call["op"] == GATHERS)):
            together = list(group)
            for part in [together] if gathers else [[call] for call in together]:
                reduced += 0 if gathers else part[0]["bytes"]
                bucket = not gathers and part[0]["bytes"] >= _BUCKET_BYTES
                rows.append(
                    {
                        "micro-batch": str(number // 3 + 1),
                        "pass": f"{name} ({brief(ended_s - began_s)})",
                        "at": brief(part[0]["began_s"] - began_s),
                        "operation": part[0]["op"],
                        "calls": str(len(part)),
                        "payload": size(sum(call["bytes"] for call in part)),
                        "gradients so far": f"{min(1.0, reduced / (4 * elements)):.0%}" if bucket else "-",
                        **_overlap(part),
                    }
                )
    yield from table(rows)


def _overlap(calls: Sequence[Record]) -> dict[str, str]:
    seconds, waited = (sum(float(call[key]) for call in calls) for key in ("seconds", "waited_s"))
    return {"time": brief(seconds), "waited": brief(waited), "overlapped": f"{1 - waited / seconds:.0%}"}


def wire(
    records: Sequence[Record], tensors: Sequence[int], stage: int, batches: tuple[int, int], link: Link
) -> tuple[list[str], list[str]]:
    """(A table per world size: the ledger's medians next to the formulas; what is wrong.) `batches`: the global batch
    and the micro-batch, whole numbers of which make a step at every world size."""
    sizes = {int(record["number"]): int(record["world_size"]) for record in records if begins_generation(record)}
    lines, wrong, counted, begun = [], [], 0, set()
    for step in steps_of(records):
        uses = [CollectiveUse.from_json(row) for row in step.get("collectives") or ()]
        found = {use.op: use.bytes for use in uses if use.axis == "dp"}
        generation = int(step["generation"])
        expected = _payload(tensors, stage, sizes[generation], batches, generation not in begun)
        begun.add(generation)
        counted += bool(found)
        if found and any(found.get(op) != count for op, count in expected.items()):
            wrong.append(f"step {step['step']} has moved {found}, not {expected}")
    for generation, ranks in sizes.items():
        medians = collective_table(records, generation)
        if medians is not None:
            lines.append(f"steps {medians.first_step} to {medians.last_step} on {ranks} ranks: medians of a step")
            expected = _payload(tensors, stage, ranks, batches)
            lines += table([_row(use, expected, ranks, link) for use in medians.rows if use.op in expected])
    lines.append(f"bytes equal the formulas in {counted - len(wrong)} of {counted} steps with a ledger in the journal")
    return lines, wrong if counted else ["the journal has no collectives"]


def _payload(
    tensors: Sequence[int], stage: int, ranks: int, batches: tuple[int, int], first: bool = False
) -> dict[str, int]:
    return costs.payload(tensors, stage, ranks, batches[0] // (batches[1] * ranks), first)


def _row(use: CollectiveUse, expected: Mapping[str, int], ranks: int, link: Link) -> dict[str, str]:
    operation = use.op.removesuffix("_into_tensor").removesuffix("_tensor")
    sent = sent_bytes(use, ranks)
    return {
        "operation": use.op,
        "calls": str(use.calls),
        "payload": f"{use.bytes:,}",
        "formula": f"{expected[use.op]:,}",
        "sent": size(sent),
        "predicted": brief(link.seconds(use.calls * steps(operation, ranks), sent)),
        "time": brief(use.seconds),
        "waited": brief(use.waited_s),
    }


def held(watched: Sequence[Record], tensors: Sequence[int], stage: int) -> tuple[list[str], list[str]]:
    """(Bytes of each rank by part, predicted and measured, at each world size; what is wrong.)"""
    rows, wrong = [], []
    for ranks in sorted({int(line["world_size"]) for line in watched}, reverse=True):
        lines = [line for line in watched if line["world_size"] == ranks]
        predicted = vars(state_bytes([[Tensors(numel) for numel in tensors]], stage, ranks, FP32_ADAM))
        for line in lines:
            if line["memory"] != predicted:
                wrong.append(f"rank {line['rank']} of {ranks} holds {line['memory']}, not {predicted}")
        for part, count in [*predicted.items(), ("all", sum(predicted.values()))]:
            measured = [line["memory"][part] if part in predicted else sum(line["memory"].values()) for line in lines]
            rows.append(
                {
                    "ranks": str(ranks),
                    "held by one": part,
                    "predicted": f"{count:,}",
                    "measured": f"{min(measured):,}" + (f" to {max(measured):,}" if len(set(measured)) > 1 else ""),
                    "of ranks": str(len(measured)),
                    "bytes per parameter": f"{count / sum(tensors):.2f}",
                }
            )
    return table(rows), wrong
