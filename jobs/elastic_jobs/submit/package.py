"""The package of a submission: the files of a folder that are sent to the cluster, their checks, and the archive."""

from __future__ import annotations

import ast
import hashlib
import os
import stat
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from elastic.core.errors import UsageError
from elastic.core.wording import plural
from elastic.observe.text import size
from elastic_jobs.submit.gitignore import Pattern, ignored, parse_patterns

# The Jobs server refuses larger requests (Ray's `DASHBOARD_CLIENT_MAX_SIZE`) without a message.
SERVER_LIMIT_BYTES = 100 * 1024 * 1024
_IGNORE_FILES = (".gitignore", ".rayignore")
# Never sent: version histories, environments and caches of this machine.
_NEVER = parse_patterns([".git", ".venv/", "venv/", "__pycache__/", ".mypy_cache/", ".ruff_cache/", ".pytest_cache/"])
_OURS = ("elastic", "elastic_jobs", "elastic_cluster")
# A fixed date makes archives of the same content identical, so the cluster recognises a package that it already has.
_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class PackedFile:
    path: str
    bytes: int


@dataclass(frozen=True)
class Package:
    """`files` are sorted by path. `left_out` are not read: links to folders or out of `root`, and special files."""

    root: Path
    files: tuple[PackedFile, ...]
    left_out: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def __contains__(self, path: str) -> bool:
        return any(file.path == path for file in self.files)


# -- listing -----------------------------------------------------------------------------------------------------------


def list_package(root: Path, exclude: Sequence[str] = ()) -> Package:
    """The files in `root` that git does not ignore, without those that match `exclude` (patterns as in .gitignore).

    Raises UsageError.
    """
    if not root.is_dir():
        raise UsageError(f"working_dir {root} is not a folder")
    files: list[PackedFile] = []
    left_out: list[str] = []
    try:
        for path, about in _walk(root, "", _from_above(root), parse_patterns(exclude)):
            if stat.S_ISREG(about.st_mode):
                files.append(PackedFile(path, about.st_size))
            else:
                left_out.append(path)
    except OSError as error:
        raise UsageError(f"working_dir {root} cannot be read: {error}") from error
    return Package(root, tuple(sorted(files, key=lambda file: file.path)), tuple(sorted(left_out)))


def _walk(
    root: Path, folder: str, patterns: tuple[Pattern, ...], last: tuple[Pattern, ...]
) -> Iterator[tuple[str, os.stat_result]]:
    """Files below `folder`. `last` overrides all other patterns. As in git, an ignored folder is not entered."""
    for name in _IGNORE_FILES:
        patterns += _patterns_of(root / folder / name, folder)
    for entry in sorted(os.scandir(root / folder), key=lambda entry: entry.name):
        path = f"{folder}/{entry.name}" if folder else entry.name
        real_folder = entry.is_dir(follow_symlinks=False)
        if ignored(path, real_folder, (*patterns, *_NEVER, *last)):
            continue
        if real_folder:
            yield from _walk(root, path, patterns, last)
        else:
            yield path, entry.stat(follow_symlinks=not _stays_a_link(entry, root))


def _stays_a_link(entry: os.DirEntry[str], root: Path) -> bool:
    """False for a link to a file in the package's folder: that file is sent in its place.

    Other links are left out: to folders, circular, broken, and out of the package's folder, where a link may point to
    a secret.
    """
    if not entry.is_symlink():
        return False
    try:
        target = Path(entry.path).resolve(strict=True)
    except (OSError, RuntimeError):
        return True
    return not (target.is_file() and target.is_relative_to(root.resolve()))


def _from_above(root: Path) -> tuple[Pattern, ...]:
    """The patterns of the folders above `root`, up to the top of its git repository, relative to `root`."""
    above = [root, *root.parents]
    top = next((i for i, folder in enumerate(above) if (folder / ".git").exists()), 0)
    found: tuple[Pattern, ...] = ()
    for folder in reversed(above[1 : top + 1]):
        found += _patterns_of(folder / ".gitignore", above=root.relative_to(folder).as_posix())
    return found


def _patterns_of(file: Path, base: str = "", above: str = "") -> tuple[Pattern, ...]:
    if not file.is_file():
        return ()
    return parse_patterns(file.read_text(encoding="utf-8", errors="replace").splitlines(), base, above)


# -- checks ------------------------------------------------------------------------------------------------------------


def check_package(package: Package, limit_bytes: int) -> None:
    """Raises UsageError for a package that is too large (with size, limit and largest entries), is empty, or hides our
    own packages."""
    if not package.files:
        raise UsageError(f"working_dir {package.root} has no files to send: .gitignore excludes all of them")
    if package.bytes > limit_bytes:
        largest = ", ".join(f"{path} ({size(held)})" for path, held in largest_entries(package.files))
        raise UsageError(
            f"working_dir {package.root} would send {size(package.bytes)} in {plural(len(package.files), 'file')}, "
            f"more than the limit of {size(limit_bytes)}; the largest: {largest}; exclude what the job does not need"
            " with .gitignore or submit.exclude"
        )
    top = {PurePosixPath(file.path).parts[0] for file in package.files}
    hiding = [name for name in _OURS if top & {name, f"{name}.py"}]
    if hiding and "elastic/runtime/controller/actor.py" not in package:
        raise UsageError(
            f"working_dir {package.root} has a top-level {hiding[0]!r}, which would hide ray-elastic's own on the "
            "cluster; rename it, or set submit.working_dir to a subfolder"
        )


def largest_entries(files: Iterable[PackedFile], count: int = 3) -> list[tuple[str, int]]:
    """The largest files and folders. A folder is replaced by its largest entry if that has 80 % of its bytes."""
    entries: Mapping[str, int] = _sizes(files, "")
    listed = list(files)
    found = []
    for path, held in sorted(entries.items(), key=lambda item: (-item[1], item[0]))[:count]:
        while path.endswith("/"):
            inner, most = max(_sizes(listed, path).items(), key=lambda item: item[1])
            if most < 0.8 * held:
                break
            path, held = inner, most
        found.append((path, held))
    return found


def _sizes(files: Iterable[PackedFile], folder: str) -> Mapping[str, int]:
    """Bytes of each entry of `folder`; folders end with a slash."""
    sizes: dict[str, int] = defaultdict(int)
    for file in files:
        if file.path.startswith(folder):
            name, slash, _ = file.path[len(folder) :].partition("/")
            sizes[f"{folder}{name}{slash}"] += file.bytes
    return sizes


def check_entry_point(package: Package, folder: str, text: str) -> None:
    """Raises UsageError unless `text` names a function of a file in the package; nothing is imported.

    `folder` is the job file's, relative to the package. Modules that are installed on the cluster do not count.
    """
    target, _, function = text.rpartition(":")
    file = _file_of(package, folder, target)
    if file is None:
        where = f"no file {target}" if target.endswith(".py") else f"no module {target!r}"
        raise UsageError(
            f"entry point {text!r}: there is {where} in the package of {package.root}; an entry point must be in the "
            "submitted package, so check whether .gitignore or submit.exclude excludes it"
        )
    _check_defines(package.root / file, function, text)


def entry_file(folder: Path, text: str) -> Path:
    """The file below `folder` that defines the entry point; nothing is imported. Raises UsageError."""
    target, _, function = text.rpartition(":")
    file = next((path for path in _candidates(str(folder), target) if Path(path).is_file()), None)
    if file is None:
        raise UsageError(f"entry point {text!r}: there is no such file or module in {folder}")
    _check_defines(Path(file), function, text)
    return Path(file)


def digest(file: Path) -> str:
    """SHA-256 of a file's content."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _check_defines(file: Path, function: str, text: str) -> None:
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"entry point {text!r} does not import: {error}") from error
    names = set(_top_level_names(tree))
    if function.split(".")[0] not in names and "*" not in names:
        raise UsageError(f"entry point {text!r}: {file.name} has no {function.split('.')[0]!r}")


def _file_of(package: Package, folder: str, target: str) -> str | None:
    return next((path for path in _candidates(folder, target) if path in package), None)


def _candidates(folder: str, target: str) -> list[str]:
    """The files that the target of an entry point may refer to."""
    if target.endswith(".py"):
        return [os.path.normpath(os.path.join(folder, target))]
    path = target.replace(".", "/")
    return [os.path.normpath(f"{folder}/{path}{end}") for end in (".py", "/__init__.py")]


def _top_level_names(tree: ast.Module) -> Iterator[str]:
    """Every name that the module's top level could bind; "*" where that cannot be determined."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)


# -- the archive -------------------------------------------------------------------------------------------------------


def write_archive(package: Package, target: Path) -> None:
    """A zip file; the same content gives the same bytes. Raises UsageError."""
    try:
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in package.files:
                info = zipfile.ZipInfo(file.path, _DATE)
                info.compress_type = zipfile.ZIP_DEFLATED
                info.external_attr = (stat.S_IMODE((package.root / file.path).stat().st_mode) | stat.S_IFREG) << 16
                archive.writestr(info, (package.root / file.path).read_bytes())
    except OSError as error:
        raise UsageError(f"working_dir {package.root} cannot be packed: {error}") from error
    packed = target.stat().st_size
    if packed > SERVER_LIMIT_BYTES:
        raise UsageError(
            f"working_dir {package.root} is {size(packed)} when packed, more than the {size(SERVER_LIMIT_BYTES)} that "
            "a Ray Jobs server accepts; keep data in storage and exclude it with .gitignore or submit.exclude"
        )
