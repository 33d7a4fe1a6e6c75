"""What all ranks have read of slices of another cut, compared with what was written, and what it makes here."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from elastic.comm.agreement import Agreement
from elastic.core.checkpoint.manifest import Manifest
from elastic.core.checkpoint.recut import Recut
from elastic.core.errors import IntegrityError
from elastic.training.state.recut.reading import Made, Seen
from elastic.training.state.verification import is_whole


def require_whole(found: Recut, seen: Seen, skipped: Collection[str], every: Agreement) -> None:
    """Each stored slice was read as it was written, and all of it equally often. Collective over all ranks: raises
    IntegrityError on all, by name. `skipped` are the buffers that this rank does not restore."""
    stored = found.stored()
    names = [each.key.split("/", 1)[1] for each in stored]
    fleeting = {*skipped, *found.whole.extra_state.get("fleeting_buffers", ())}
    totals = every.sums([part for each in stored for part in seen.get((each.key, each.lane), (0, 0))])
    left, _ = every.any_and_unequal([name in fleeting for name in names], [])
    for each, name, unread, total, count in zip(stored, names, left, totals[::2], totals[1::2], strict=True):
        times, rest = divmod(count, each.numel)
        if unread and not count:
            continue
        if rest or not times or each.digest is None or total != times * each.digest % 2**64:
            kind = each.key.split("/", 1)[0]
            raise IntegrityError(f"{kind} of {name!r} in checkpoint {found.whole.id} is not what was written")


def expected_digests(
    found: Recut, manifest: Manifest, made: Made, zero_stage: int, shards: Agreement
) -> Mapping[str, int]:
    """What the live tensors must have once all is installed: of what is cut here or there by what was read, of all else
    by what the checkpoint says. `manifest` is that of `found`, or a part of it.

    Collective over `shards`, the ranks that have everything of this lane once between them.
    """
    keys = sorted(manifest.digests)
    sums = dict(zip(keys, shards.sums([made.get(key, 0) for key in keys]), strict=True))
    expected = dict(manifest.digests)
    for key in keys:
        kind, name = key.split("/", 1)
        if name in found.source or name in found.target:
            expected[key] = made.get(key, 0) if is_whole(kind, zero_stage) else sums[key]
    return expected
