"""A hub to load from, and a tiny model on it."""

from __future__ import annotations

from pathlib import Path

import golden
import pytest
from hub_server import hub as hub

from flaxen.convert.formats.checkpoint import Checkpoint


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    return golden.write_folder(golden.case("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def llama_shards(tmp_path_factory) -> Path:
    return golden.write_folder(golden.case("llama"), tmp_path_factory.mktemp("shards"), shards=3)


@pytest.fixture(scope="session")
def same_weights():
    """Whether a checkpoint holds the tiny llama, bit for bit."""
    weights = golden.case("llama").weights

    def check(checkpoint: Checkpoint) -> bool:
        return {name: t.read().tobytes() for name, t in checkpoint.items()} == {
            name: array.tobytes() for name, array in weights.items()
        }

    return check
