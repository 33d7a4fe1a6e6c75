"""Memory that this node can still provide: what the kernel reports as available, or less under a cgroup limit."""

from __future__ import annotations

from pathlib import Path

GIB = 1 << 30


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The smallest of MemAvailable and every limit minus usage on the way from this process's cgroup to the root."""
    lefts = [_meminfo(proc / "meminfo")]
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            lefts += _lefts(cgroup, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            lefts += _lefts(cgroup / "memory", path, names)
    return max(0, min(lefts))


def gib(nbytes: int) -> str:
    """For messages: "1.50 GiB"."""
    return f"{nbytes / GIB:.2f} GiB"


def _meminfo(path: Path) -> int:
    for line in _read(path).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no line MemAvailable")


def _lefts(root: Path, path: str, names: tuple[str, str, str]) -> list[int]:
    # In a container the path may be the host's and not exist here; the root is then the container's own group.
    own = root / path.lstrip("/")
    groups = [own, *own.parents]
    groups = groups[: groups.index(root) + 1] if root in groups else [root]
    return [left for left in (_left(group, *names) for group in groups) if left is not None]


def _left(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    limit, usage = _read(group / limit_name).strip(), _read(group / usage_name).strip()
    if not limit.isdigit() or not usage.isdigit():
        return None  # "max", or no such group
    # Cached files count as usage, but the kernel drops them when memory is needed.
    cache = [line.split()[1] for line in _read(group / "memory.stat").splitlines() if line.split()[:1] == [cache_name]]
    return int(limit) - int(usage) + sum(map(int, cache))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
