"""`import flaxen` is free: no backend, no heavy module, no change of the environment."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import flaxen

SCRIPT = """
import json, os, sys, time
before = dict(os.environ)
start = time.perf_counter()
import flaxen
seconds = time.perf_counter() - start
print(json.dumps([seconds, sorted(sys.modules), before == dict(os.environ)]))
"""


def _import_flaxen() -> tuple[float, list[str], bool]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    return tuple(json.loads(done.stdout))


def test_import_is_quick_and_changes_nothing():
    runs = [_import_flaxen() for _ in range(5)]
    assert min(seconds for seconds, _, _ in runs) < 0.1
    _, modules, same_environment = runs[0]
    assert same_environment
    assert not {"jax", "jaxlib", "numpy", "transformers", "rich", "cyclopts"} & set(modules)


def test_every_public_name_is_listed_and_has_a_home():
    listed = set(dir(flaxen))
    assert set(flaxen.__all__) <= listed
    assert set(flaxen.__all__) - {"__version__"} == set(flaxen._HOME)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        _ = flaxen.laod


def test_errors_are_found_by_their_public_name():
    assert issubclass(flaxen.CheckpointError, flaxen.FlaxenError)
    assert issubclass(flaxen.FlaxenError, ValueError)
