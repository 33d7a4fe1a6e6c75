"""The entry point is loaded once before anything starts; each mistake is one sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.core.errors import UsageError
from elastic.entrypoint import call_entry_point, load_entry_point, parse_entry_point


@pytest.fixture(autouse=True)
def _clean_imports() -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(tmp_path: Path, text: str, name: str = "my_train.py") -> None:
    (tmp_path / name).write_text(text)


def test_a_file_relative_to_the_job(tmp_path: Path) -> None:
    write(tmp_path, "import my_helper\ndef main(config):\n    return my_helper.X + config['y']\n")
    write(tmp_path, "X = 1\n", "my_helper.py")
    entry = parse_entry_point("my_train.py:main", tmp_path)
    assert call_entry_point(load_entry_point(entry), {"y": 2}) == 3
    # What the workers are told can be loaded from anywhere.
    assert call_entry_point(load_entry_point(str(entry)), {"y": 2}) == 3


def test_a_module_beside_the_job(tmp_path: Path) -> None:
    write(tmp_path, "class A:\n    @staticmethod\n    def main():\n        return 5\n")
    entry = parse_entry_point("my_train:A.main", tmp_path)
    assert call_entry_point(load_entry_point(entry), {"y": 2}) == 5


def test_a_file_named_like_a_known_module_does_not_replace_it(tmp_path: Path) -> None:
    write(tmp_path, "def main(config): return 'mine'\n", "json.py")
    known = sys.modules["json"]
    assert call_entry_point(load_entry_point(parse_entry_point("json.py:main", tmp_path)), {}) == "mine"
    assert sys.modules["json"] is known


def test_a_file_in_a_package_may_import_relatively(tmp_path: Path) -> None:
    (tmp_path / "my_pkg" / "sub").mkdir(parents=True)
    for name in ("my_pkg/__init__.py", "my_pkg/sub/__init__.py"):
        write(tmp_path, "", name)
    write(tmp_path, "X = 7\n", "my_pkg/values.py")
    write(tmp_path, "from ..values import X\ndef train(config): return X\n", "my_pkg/sub/m.py")
    entry = parse_entry_point("my_pkg/sub/m.py:train", tmp_path)
    assert call_entry_point(load_entry_point(entry), {}) == 7
    assert sys.modules["my_pkg.sub.m"].X == 7
    # Another package of that name is not taken for it.
    other = tmp_path / "other"
    (other / "my_pkg" / "sub").mkdir(parents=True)
    for name in ("my_pkg/__init__.py", "my_pkg/sub/__init__.py", "my_pkg/sub/m.py"):
        write(other, "def train(config): return 8\n", name)
    with pytest.raises(UsageError, match="which hides"):
        load_entry_point(parse_entry_point("my_pkg/sub/m.py:train", other))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("my_train", "must be 'module:function'"),
        ("my_train.py:", "must be 'module:function'"),
        (":main", "must be 'module:function'"),
        ("my_train:ma in", "must be 'module:function'"),
        ("a/b:main", "neither a module's name nor a file ending in .py"),
        ("nope.py:main", "there is no file"),
        ("no_such_module:main", "there is no module 'no_such_module'"),
        ("my_train.py:mian", "has no 'mian'; did you mean 'main'?"),
        ("my_train.py:VALUE", "must be a function, but is of type 'int'"),
        ("my_train.py:two", "is called with one argument, the config, but is two(a, b)"),
    ],
)
def test_mistakes(tmp_path: Path, entry: str, said: str) -> None:
    write(tmp_path, "VALUE = 3\ndef main(config): ...\ndef two(a, b): ...\n")
    with pytest.raises(UsageError) as caught:
        load_entry_point(parse_entry_point(entry, tmp_path))
    assert said in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def main(:\n", "my_train.py line 1"),
        ("import no_such_package_x\n", "it needs 'no_such_package_x', not installed"),
        ("X = 1\n1 / 0\n", "ZeroDivisionError: division by zero in {folder}/my_train.py line 2"),
        ("import json\n\njson.loads('x')\n", "char 0) in {folder}/my_train.py line 3"),
        ("from . import x\n", "with no known parent package in {folder}/my_train.py line 1"),
        ("raise SystemExit(0)\n", "exits at import"),
    ],
)
def test_a_module_that_does_not_import(tmp_path: Path, text: str, said: str) -> None:
    write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        load_entry_point(parse_entry_point("my_train.py:main", tmp_path))
    assert "does not import" in caught.value.message
    assert said.format(folder=tmp_path) in caught.value.message
    assert "my_train" not in sys.modules
