"""The story: one sentence per decision, in order, with times; nothing that could harm a terminal."""

from __future__ import annotations

from sample_journal import journal

from elastic.observe.story import heading, story


def test_decisions_incidents_and_ends_are_told() -> None:
    lines = [str(line) for line in story(journal())]
    assert lines == [
        "00:01:41     +1.00 s  run is running",
        "00:01:42     +2.00 s  [gen 1, world 4, step 0] 4 workers ready",
        "00:01:47     +7.00 s  [gen 1, world 4, step 41] incident 1: node-lost, node abcdef01 (worker 2); "
        "continue with the survivors; world size 4 -> 3; detected after 0.25 s, "
        "decided after 0.50 s, rebuilt after 1.00 s, restored after 1.50 s, "
        "first step after 2.00 s; 1 step repeated; state from storage",
        "00:01:51    +11.00 s  [step 100] run is finished, loss 2.5000",
    ]  # fmt: skip


def test_checkpoints_are_told_when_asked_for() -> None:
    told = [line.sentence for line in story(journal(), everything=True) if line.kind == "checkpoint"]
    assert told[0] == ("checkpoint c40 is complete: step 40, 12.3 MB, written in 0.50 s, training waited 0.01 s")


def test_a_run_record_is_told_only_when_its_status_changes() -> None:
    records = [{"type": "run", "status": "running", "step": step, "time": float(step)} for step in range(5)]
    assert len(story(records)) == 1


def test_a_new_controller_is_told() -> None:
    records = [
        {"type": "begin", "incarnation": 1, "time": 0.0, "read": {}},
        {"type": "begin", "incarnation": 2, "time": 5.0, "read": {"1": 12}},
    ]
    assert [line.sentence for line in story(records)] == ["controller 2 took over after replaying 12 records"]


def test_control_characters_of_user_code_do_not_reach_the_terminal() -> None:
    records = [{"type": "decision", "time": 0.0, "sentence": "rank 1 said \x1b[31mred\x07\nand\tmore"}]
    assert story(records)[0].sentence == "rank 1 said [31mred and more"


def test_heading() -> None:
    assert heading("r1", journal()) == "run r1, begun 1970-01-01 00:01:40 UTC"
    assert heading("r1", []) == "run r1: nothing has happened yet"
