"""Importing `transformers` for its configs and tokenizers."""

from __future__ import annotations

import logging
from types import ModuleType


def transformers() -> ModuleType:
    """The `transformers` package, which takes about a second to import the first time.

    It says then that there is no torch; here there never is, so that is left out.
    """
    logging.getLogger("transformers").addFilter(_is_not_torch_advice)
    import transformers

    return transformers


def _is_not_torch_advice(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("PyTorch was not found")
