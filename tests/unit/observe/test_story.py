"""The story: one sentence per decision, in order, with times; nothing that could harm a terminal."""

from __future__ import annotations

from sample_journal import journal

from elastic.observe.story import heading, story
from elastic.observe.text import size


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


def test_every_mesh_that_a_generation_could_have_had_follows_the_decision() -> None:
    meshes = [
        {"axes": {"ep": 1}, "world_size": 3, "step": 0.25, "measured": True, "seconds": True, "moved": 0.25,
         "chosen": True},
        {"axes": {"ep": 2}, "world_size": 2, "step": 0.5, "measured": False, "seconds": True, "chosen": False,
         "peak_bytes": 3 << 30, "limit_bytes": 4 << 30},
        {"axes": {"ep": 2}, "world_size": 2, "step": 0.5, "measured": False, "seconds": False, "chosen": False},
        {"axes": {"ep": 4}, "world_size": 0, "refusal": "3 workers, and it needs 4", "chosen": False},
    ]  # fmt: skip
    records = [{"type": "decision", "kind": "mesh", "time": 0.0, "sentence": "3 workers", "data": {"meshes": meshes}}]
    assert [line.sentence for line in story(records)] == [
        "3 workers",
        "  ep 1: 3 workers, step 0.25 s, 25 % of it over the network, chosen",
        f"  ep 2: 2 workers, step 0.50 s expected, {size(3 << 30)} of {size(4 << 30)} expected",
        "  ep 2: 2 workers, step 0.5000 of one worker's",
        "  ep 4: 3 workers, and it needs 4",
    ]


def test_what_each_option_would_have_cost_follows_the_decision() -> None:
    options = [
        {"option": "shrink", "world_size": 7, "after_s": 0.0, "lost_node_s": 39.64, "price": 0.4},
        {"option": "wait", "world_size": 8, "after_s": 2.1, "lost_node_s": 8.39, "price": 0.08},
    ]
    data = {"chosen": "wait", "options": options}
    records = [{"type": "decision", "kind": "waiting", "time": 0.0, "sentence": "waiting 4 s at most", "data": data}]
    assert [line.sentence for line in story(records)] == [
        "waiting 4 s at most",
        "  shrink: 7 workers now, 39.6 node-seconds lost, 0.40 in money",
        "  wait: 8 workers in 2.10 s, 8.4 node-seconds lost, 0.08 in money, chosen",
    ]
