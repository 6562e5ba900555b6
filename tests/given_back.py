"""Checkpoints of odd weights, written, and compared with what a model saves."""

from __future__ import annotations

import golden
import numpy as np
from safetensors.numpy import load_file


def written(case, weights, folder):
    return golden.write_folder(golden.Case("odd", case.about, case.arrays, weights), folder)


def assert_given_back(model, weights, folder):
    """Saved, and once more after loading that: names and bytes are those of the file."""
    model.save(folder)
    found = load_file(folder / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, array in weights.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array, err_msg=name)
