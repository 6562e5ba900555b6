"""What a reader may rely on in every file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import flaxen

SOURCE = Path(flaxen.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
every_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))


@every_file
def test_files_are_short(path: Path):
    assert len(path.read_text().splitlines()) <= 300


@every_file
def test_names_say_what_is_inside(path: Path):
    assert not re.search(r"util|helper|manager", path.stem)


@every_file
def test_the_first_line_says_what_the_module_is(path: Path):
    assert ast.get_docstring(ast.parse(path.read_text()))


@every_file
def test_nothing_from_outside_is_executed(path: Path):
    tree = ast.parse(path.read_text())
    calls = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    assert not calls & {"eval", "exec", "compile", "__import__"}
    imports = {
        a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names
    }
    imports |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    assert not imports & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    assert not re.search(r"trust_remote_code\s*=\s*True", path.read_text())


@every_file
def test_nothing_is_left_for_later(path: Path):
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", path.read_text())
