"""Single moves of the parameter server's rules; whole runs are in tests/simulation/test_parameter_server.py."""

from __future__ import annotations

import pytest

from elastic.core.server.global_batches import (
    Answer,
    Asked,
    Batches,
    Counted,
    Cut,
    Event,
    Finished,
    Given,
    Members,
    Pushed,
    Unknown,
    Wait,
    begin,
    step,
)
from elastic.core.typed_json import decode, encode


class Run:
    """A state and what was answered last."""

    def __init__(self, state: Batches, *workers: str) -> None:
        self.state = state
        self.tell(Members(workers))

    def tell(self, event: Event) -> Answer:
        self.state, answer = step(self.state, event)
        return answer

    def lease(self, worker: str, seen: int = 0) -> Given:
        answer = self.tell(Asked(worker, seen))
        assert isinstance(answer, Given), answer
        return answer

    def push(self, worker: str, given: Given) -> Answer:
        return self.tell(Pushed(worker, given.lease.number))


def test_an_update_is_one_whole_batch_in_the_order_of_its_samples() -> None:
    run = Run(begin(2, 0, 2), "a", "b")
    first, second = run.lease("a"), run.lease("b")
    assert run.push("b", second) == Counted(0)
    assert isinstance(run.tell(Asked("b", 0)), Wait), "staleness 0: the next batch waits for this one"
    assert run.push("a", first) == Counted(1)
    assert [part.micro for part in run.state.batches[0]] == [0, 1]


def test_a_clock_that_is_behind_holds_others_until_its_worker_is_lost() -> None:
    run = Run(begin(1, 1, 9), "slow", "fast")
    slow = run.lease("slow")
    run.push("fast", run.lease("fast"))
    wait = run.tell(Asked("fast", 0))
    assert wait == Wait("global batch 2 is too far ahead of batch 0 of worker slow")
    run.tell(Members(("fast",)))
    assert run.lease("fast").lease.micro == 0, "what the lost worker computed is computed again"
    assert isinstance(run.push("slow", slow), Unknown)
    assert isinstance(run.tell(Asked("slow", 0)), Unknown)


def test_a_gradient_within_the_bound_counts() -> None:
    run = Run(begin(1, 1, 9), "a", "b")
    old = run.lease("a")
    run.push("b", run.lease("b"))
    assert run.push("a", old) == Counted(2), "one update since is permitted"


def test_too_old_is_answered_by_a_new_lease_of_the_same_samples() -> None:
    run = Run(begin(1, 1, 9), "a", "b", "c")
    leases = {name: run.lease(name) for name in ("a", "b")}
    assert leases["b"].lease.version == 0
    run.push("a", leases["a"])  # update 1
    third = run.lease("c")  # of batch 2, from version 1
    run.push("c", third)  # update 2
    again = run.push("b", leases["b"])
    assert isinstance(again, Given)
    assert (again.lease.micro, again.lease.version) == (1, 2)
    assert again.lease.number != leases["b"].lease.number
    assert isinstance(run.push("b", leases["b"]), Unknown), "what was sent under the old number does not count"
    assert run.push("b", again) == Counted(3)


def test_an_answer_that_was_lost_is_given_again() -> None:
    run = Run(begin(1, 0, 3), "a")
    first = run.lease("a")
    again = run.lease("a")
    assert again.lease.micro == first.lease.micro
    assert again.lease.number != first.lease.number
    assert isinstance(run.push("a", first), Unknown)
    assert run.push("a", again) == run.push("a", again) == Counted(1)
    assert run.state.version == 1


def test_batches_are_kept_until_every_shard_has_applied_them() -> None:
    run = Run(begin(1, 0, 3), "a")
    run.push("a", run.lease("a"))
    assert set(run.lease("a", seen=0).batches) == {0}
    assert set(run.lease("a", seen=1).batches) == set()


def test_a_cut_says_which_samples_are_in_it_and_a_run_continues_from_it() -> None:
    run = Run(begin(2, 1, 3, cut_every=1), "a", "b")
    held = run.lease("a")
    for _ in range(2):
        run.push("b", run.lease("b"))
    assert run.state.cuts == (Cut(1, 3, (held.lease.micro,)),)
    resumed = Run(begin(2, 1, 3, cut=run.state.cuts[0]), "c")
    computed = []
    while isinstance(answer := resumed.tell(Asked("c", 1)), Given):
        computed.append(answer.lease.micro)
        resumed.push("c", answer)
    assert computed == [0, 3, 4, 5]
    assert isinstance(answer, Finished)
    assert [part.micro for part in resumed.state.batches[1]] == [0, 3]


def test_the_end_waits_for_what_may_still_be_lost() -> None:
    run = Run(begin(2, 3, 1), "a", "b", "c")
    first, second = run.lease("a"), run.lease("b")
    assert isinstance(run.tell(Asked("c", 0)), Wait)
    run.push("a", first)
    run.push("b", second)
    assert isinstance(run.tell(Asked("c", 0)), Finished)


def test_the_state_travels_as_json() -> None:
    run = Run(begin(1, 1, 3, cut_every=1), "a", "b")
    run.push("a", run.lease("a"))
    run.lease("b")
    assert decode(Batches, encode(run.state)) == run.state


@pytest.mark.parametrize("settings", [(0, 0, 1), (1, -1, 1), (1, 0, 0)])
def test_what_makes_no_run_is_refused(settings: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="make no run"):
        begin(*settings)
