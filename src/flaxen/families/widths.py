"""Which weights no 16-bit dtype is for: the corrections of routers, and what a family names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from flaxen.core.tree import buffers
from flaxen.families.family import Family


def kept_wide(module: Any, family: Family, names: Mapping[str, str], kind: Any) -> set[str]:
    """The paths of weights that stay as they are stored where `kind` is asked for all of a model.

    names: under which name each path stands in the file.
    """
    if kind is None or np.dtype(kind).itemsize != 2:
        return set()
    pattern = f"{family.wide}|{family.not_half}" if kind == np.float16 else family.wide
    return {*buffers(module)} | {path for path, name in names.items() if re.search(pattern, name)}
