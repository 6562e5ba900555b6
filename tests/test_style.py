"""What a reader may rely on in every file."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path

import flaxen

SOURCE = Path(flaxen.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def where(found: Callable[[Path], object]) -> list[str]:
    """The files of which something is so."""
    return [str(path.relative_to(SOURCE)) for path in FILES if found(path)]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_files_are_short():
    assert where(lambda path: len(path.read_text().splitlines()) > 300) == []


def test_names_say_what_is_inside():
    assert where(lambda path: re.search(r"util|helper|manager", path.stem)) == []


def test_the_first_line_says_what_the_module_is():
    assert where(lambda path: not ast.get_docstring(tree_of(path))) == []


def executes(path: Path) -> bool:
    tree = tree_of(path)
    calls = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    imports = {
        a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names
    }
    imports |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    return bool(
        calls & {"eval", "exec", "compile", "__import__"}
        or imports & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
        or re.search(r"trust_remote_code\s*=\s*True", path.read_text())
    )


def test_nothing_from_outside_is_executed():
    assert where(executes) == []


def test_nothing_is_left_for_later():
    assert where(lambda path: re.search(r"\b(TODO|FIXME|XXX|HACK)\b", path.read_text())) == []
