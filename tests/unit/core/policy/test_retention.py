from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.errors import IntegrityError, UsageError
from elastic.core.names import CheckpointRef, check_file, check_run_id, checkpoint_id, parse_checkpoint_id, shard_file
from elastic.core.policy.retention import to_delete

REFS = st.lists(
    st.builds(CheckpointRef, generation=st.integers(0, 5), step=st.integers(0, 30)), unique=True, max_size=20
)


@given(
    refs=REFS, keep_last=st.integers(1, 5), every=st.none() | st.integers(1, 10), protected=st.sets(st.integers(0, 19))
)
def test_what_is_deleted_is_kept_by_no_rule(refs, keep_last, every, protected) -> None:
    protect = {ref.id for number, ref in enumerate(refs) if number in protected}
    gone = to_delete(refs, keep_last, every, protect)
    newest = sorted(refs, reverse=True)
    assert not set(gone) & set(newest[:keep_last])
    assert not {ref.id for ref in gone} & protect
    assert list(gone) == sorted(gone)
    kept = set(refs) - set(gone)
    if every is not None:
        multiples = {ref.step for ref in refs if ref.step % every == 0}
        assert multiples <= {ref.step for ref in kept}
    # Whatever is kept has a reason.
    for ref in kept - set(newest[:keep_last]):
        assert ref.id in protect or (every is not None and ref.step % every == 0)
    assert to_delete(kept, keep_last, every, protect) == ()


def test_a_later_generation_is_newer_even_at_a_smaller_step() -> None:
    refs = [CheckpointRef(2, 60), CheckpointRef(3, 45), CheckpointRef(2, 40)]
    assert to_delete(refs, 1) == (CheckpointRef(2, 40), CheckpointRef(2, 60))


def test_of_one_step_only_the_generation_that_replaced_the_others() -> None:
    refs = [CheckpointRef(1, 40), CheckpointRef(2, 40), CheckpointRef(3, 50)]
    assert to_delete(refs, 1, keep_every_steps=20) == (CheckpointRef(1, 40),)


def test_bad_settings() -> None:
    with pytest.raises(UsageError, match="keep_last"):
        to_delete([], 0)
    with pytest.raises(UsageError, match="keep_every_steps"):
        to_delete([], 1, 0)


@given(step=st.integers(0, 10**15), generation=st.integers(0, 10**9))
def test_ids_are_read_back(step: int, generation: int) -> None:
    assert parse_checkpoint_id(checkpoint_id(step, generation)) == CheckpointRef(generation, step)
    assert CheckpointRef(generation, step).id == checkpoint_id(step, generation)


@pytest.mark.parametrize(
    "text",
    ["", "..", "step-1-g1", "step-00000001-g0001/..", "step-000000001-g0001", "step-00000001-g0001 ",
     "STEP-00000001-g0001", "step-0000000\u0661-g0001", "step-00000001-g0001\n"],
)  # fmt: skip
def test_other_ids_are_refused(text: str) -> None:
    with pytest.raises(IntegrityError, match="not the id of a checkpoint"):
        parse_checkpoint_id(text)


@pytest.mark.parametrize(
    "text", ["", ".", "..", "a/b", "/a", "a..b", ".a", "a\\b", "a b", "a\n", "x" * 129, "-a", "a."]
)
def test_run_ids_that_could_lead_elsewhere(text: str) -> None:
    with pytest.raises(UsageError, match="run id"):
        check_run_id(text)


def test_good_names() -> None:
    assert checkpoint_id(40, 3) == "step-00000040-g0003"
    assert shard_file(2, 12) == "rank-00002-of-00012.safetensors"
    for run_id in ("a", "run-1", "2026.11.21_x"):
        assert check_run_id(run_id) == run_id
    assert check_file(shard_file(0, 1)) == "rank-00000-of-00001.safetensors"
