"""The shape of the code: no import circles, folders that can be walked, tests found by the name of their module."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
HOMES = {
    "elastic": ROOT / "elastic",
    "elastic_jobs": ROOT / "jobs" / "elastic_jobs",
    "elastic_cluster": ROOT / "cluster" / "elastic_cluster",
}
MOST_MODULES = 16
TESTS = ROOT / "tests"


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def modules() -> dict[str, Path]:
    """Dotted name to file, packages included."""
    found = {}
    for name, home in HOMES.items():
        for file in home.rglob("*.py"):
            parts = (name, *file.relative_to(home).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = file
    return found


def imports(name: str, file: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Modules that `file` imports anywhere: at its top, inside functions, or for the type checker only."""
    for node in ast.walk(tree(file)):
        wanted: Iterable[str] = ()
        if isinstance(node, ast.Import):
            wanted = (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            wanted = (f"{node.module}.{alias.name}" for alias in node.names)
        for dotted in wanted:
            while dotted and dotted not in known:
                dotted = dotted.rpartition(".")[0]
            if dotted and dotted != name:
                yield dotted


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components with more than one member (Tarjan 1972, on an explicit stack)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []
    for root in sorted(graph):
        if root in index:
            continue
        work = [(root, iter(sorted(graph[root])))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            node, others = work[-1]
            for other in others:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    work.append((other, iter(sorted(graph[other]))))
                    break
                if other in stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    position = stack.index(node)
                    members, stack[position:] = stack[position:], []
                    if len(members) > 1:
                        found.append(sorted(members))
    return found


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}) == [["a", "b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_import_circles() -> None:
    """Late and type-only imports count: modules that need each other are one design, whatever the interpreter says."""
    known = modules()
    # A package's own `__init__` is its table of contents: its parts may be imported there and by each other.
    tables = {name for name, file in known.items() if file.name == "__init__.py"}
    graph = {name: set(imports(name, file, known)) - tables for name, file in known.items() if name not in tables}
    assert circles(graph) == []


@cache
def names(file: Path) -> set[str]:
    """What a module binds at its top or within an `if` or `try` there."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(tree(file).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        else:
            waiting.extend(ast.iter_child_nodes(node))
    return found


def test_what_tests_import_is_there() -> None:
    """Imports within functions too: a slow test would show only when it runs that a module has moved."""
    known = modules()
    missing = []
    for folder in ("tests", "benchmarks", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(tree(file)):
                if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] not in HOMES:
                    continue
                home = known.get(node.module or "")
                there = names(home) | {"__version__"} if home else set()
                for alias in node.names:
                    if alias.name not in there and f"{node.module}.{alias.name}" not in known:
                        missing.append(f"{file.relative_to(ROOT)}:{node.lineno}: {node.module}.{alias.name}")
    assert missing == []


@pytest.mark.parametrize("home", HOMES.values(), ids=HOMES)
def test_folders_can_be_walked(home: Path) -> None:
    folders = {file.parent for file in home.rglob("*.py")}
    crowded = {
        str(folder.relative_to(ROOT)): count
        for folder in folders
        if (count := sum(file.name != "__init__.py" for file in folder.glob("*.py"))) > MOST_MODULES
    }
    assert crowded == {}


@pytest.mark.parametrize("home", HOMES.values(), ids=HOMES)
def test_packages_say_what_is_in_them(home: Path) -> None:
    silent = [str(file.relative_to(ROOT)) for file in home.rglob("__init__.py") if not ast.get_docstring(tree(file))]
    assert silent == []


def test_one_package_imports_deepspeed() -> None:
    users = set()
    for name, file in modules().items():
        for node in ast.walk(tree(file)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(found.split(".")[0] == "deepspeed" for found in names):
                users.add(".".join(name.split(".")[:3]))
    assert users == {"elastic.engines.deepspeed"}


def test_every_module_has_a_test_that_can_be_found() -> None:
    """By its name, `test_<module>.py` in any level of tests, or in tests/where.yaml."""
    named = {file.stem.removeprefix("test_") for file in TESTS.rglob("test_*.py")}
    listed: dict[str, str] = yaml.safe_load((TESTS / "where.yaml").read_text())
    known = {name for name, file in modules().items() if file.name != "__init__.py"}
    assert sorted(listed.keys() - known) == [], "modules that do not exist"
    assert sorted(test for test in listed.values() if not (TESTS / test).is_file()) == [], "tests that do not exist"
    assert sorted(name for name in known - listed.keys() if name.rpartition(".")[2] not in named) == []


def test_make_test_runs_some_of_each_file_of_real_processes() -> None:
    listed: dict[str, list[str]] = yaml.safe_load((TESTS / "first.yaml").read_text())
    files = {f"processes/{file.name}" for file in (TESTS / "processes").glob("test_*.py")}
    # What a file's tests share takes as long as all of them.
    layouts = {file for file in files if file.endswith(("_layouts.py", "_bytes.py"))}
    alone = {"test_gpu_bench", "test_lab", "test_weights_of_engines", "test_state_native"}
    assert files - listed.keys() <= layouts | {f"processes/{name}.py" for name in alone}
    assert [file for file in listed if not (TESTS / file).is_file()] == []
