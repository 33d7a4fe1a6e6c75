"""What `Sender` and `Hasher` share: the newest commit wins, `retire` finishes it, `stop` does not."""

from __future__ import annotations

import queue
import threading

from elastic.checkpoint.memory.server.commit_thread import CommitThread, Job

LIMIT_S = 20.0


class Slow(CommitThread):
    """Reports each job that it takes, and works on it until it is allowed to continue."""

    def __init__(self) -> None:
        super().__init__("slow", lambda: None)
        self.taken: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.allowed = threading.Semaphore(0)
        self.interrupts = 0

    def _work(self) -> None:
        job: Job | None = None
        while (job := self._next(job)) is not None:
            self.taken.put(job.step)
            self.allowed.acquire(timeout=LIMIT_S)
            self.sent_step = job.step

    def _refusal(self, why: str) -> str:
        return why

    def _interrupt(self) -> None:
        self.interrupts += 1
        self.allowed.release()


def busy_with(step: int) -> Slow:
    thread = Slow()
    thread.start()
    thread.send(Job(step, 0, None))
    assert thread.taken.get(timeout=LIMIT_S) == step
    return thread


def ended(thread: Slow) -> bool:
    thread.join(LIMIT_S)
    return not thread.is_alive()


def test_a_commit_that_is_not_taken_yet_is_replaced_by_a_newer_one() -> None:
    thread = busy_with(1)
    thread.send(Job(2, 1, None))
    thread.send(Job(3, 0, None))
    thread.allowed.release()
    assert thread.taken.get(timeout=LIMIT_S) == 3
    thread.stop()
    assert ended(thread)


def test_a_retired_thread_does_the_last_commit_and_ends() -> None:
    thread = busy_with(1)
    thread.send(Job(2, 1, None))
    thread.retire()
    thread.allowed.release(2)
    assert ended(thread)
    assert (thread.sent_step, thread.interrupts) == (2, 0)


def test_a_stopped_thread_is_interrupted_and_takes_no_further_commit() -> None:
    thread = busy_with(1)
    thread.send(Job(2, 1, None))
    thread.stop()
    assert ended(thread)
    assert (thread.sent_step, thread.interrupts, thread.taken.empty()) == (1, 1, True)


def test_an_unforeseen_error_ends_the_thread_and_is_a_loss() -> None:
    class Failing(CommitThread):
        def _work(self) -> None:
            raise MemoryError("cannot map")

        def _refusal(self, why: str) -> str:
            return f"no hash: {why}"

    told = threading.Event()
    thread = Failing("failing", told.set)
    thread.start()
    assert told.wait(LIMIT_S)
    thread.join(LIMIT_S)
    assert thread.lost
    assert thread.problem == "no hash: MemoryError('cannot map')"
