"""What a node says it can give, and one piece of its memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic.checkpoint.memory.limits import available_bytes
from elastic.checkpoint.memory.segments import Segment, map_segment

KIB = 1024


def node(tmp_path: Path, cgroup: str = "", files: dict[str, str] | None = None) -> tuple[Path, Path]:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable:    5000 kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    for name, text in (files or {}).items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    return proc, groups


def test_what_the_kernel_has(tmp_path: Path) -> None:
    assert available_bytes(*node(tmp_path)) == 5000 * KIB


def v2(path: str, limit: str, usage: int, inactive: int = 0) -> dict[str, str]:
    return {
        f"{path}memory.max": f"{limit}\n",
        f"{path}memory.current": f"{usage}\n",
        f"{path}memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (v2("a/b/", "max", 100), 5000 * KIB),
        (v2("a/b/", "3000000", 1_000_000, 300_000), 2_300_000),
        ({**v2("a/b/", "3000000", 1_000_000), **v2("a/", "1500000", 1_000_000)}, 500_000),
        (v2("a/b/", "100", 200), 0),
        (v2("", "2000000", 500_000), 1_500_000),  # in a container, which does not see the path
    ],
)
def test_version_two_groups(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert available_bytes(*node(tmp_path, "0::/a/b\n", files)) == expected


def test_version_one_groups(tmp_path: Path) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": "4000000",
        "memory/job/memory.usage_in_bytes": "1000000",
        "memory/job/memory.stat": "total_inactive_file 200000\ninactive_file 7",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": "1000000",
    }
    groups = "11:cpu,cpuacct:/job\n4:memory:/job\n0::/\n"
    assert available_bytes(*node(tmp_path, groups, files)) == 3_200_000


def test_this_machine() -> None:
    assert 0 < available_bytes() < 1 << 50


def test_a_segment_is_provided_bit_by_bit() -> None:
    segment = Segment(40 << 20)
    assert segment.unpopulated_bytes == 40 << 20
    with segment.map() as view:
        view[:3] = b"abc"
    assert segment.rough
    segment.populate()
    assert segment.unpopulated_bytes == 8 << 20
    segment.populate()
    assert segment.unpopulated_bytes == 0
    assert not segment.rough
    with segment.map() as view:
        assert bytes(view[:4]) == b"abc\0"
    segment.close()


def test_what_one_process_writes_the_other_sees() -> None:
    segment = Segment(5)
    fd = os.dup(segment.fd)
    mapped = map_segment(fd, 5)
    os.close(fd)
    mapped[:5] = b"hello"
    reader = segment.reader_fd()
    assert os.pread(reader, 100, 0) == b"hello"
    os.close(reader)
    segment.close()
    assert mapped[:5] == b"hello"  # memory goes with its last user
    mapped.close()


def test_an_empty_segment() -> None:
    segment = Segment(0)
    with segment.map() as view:
        assert len(view) == 0
    segment.close()
