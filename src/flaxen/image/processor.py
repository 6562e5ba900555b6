"""What turns pictures into the arrays that a model takes: Transformers' own image processors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from flaxen.core.errors import CheckpointError
from flaxen.core.hugging_face import transformers

FILES = ("preprocessor_config.json", "processor_config.json")


def image_processor(path: str | os.PathLike[str], *, revision: str | None = None) -> Any:
    """The image processor of a Hugging Face folder or a hub id, in the form that needs no torch:
    `processor(images=[...], return_tensors="np")`.

    Code that comes with a checkpoint is never run.

    Raises:
        CheckpointError: there is none, or none of a kind that is known.
    """
    here = Path(path).expanduser()
    if here.exists() and not any((here / name).is_file() for name in FILES):
        raise CheckpointError(
            f"{here} says nothing of pictures: neither {' nor '.join(FILES)} is there."
        )
    where = os.fspath(here) if here.exists() else os.fspath(path)
    try:
        return transformers().AutoImageProcessor.from_pretrained(
            where, revision=revision, backend="pil", trust_remote_code=False
        )
    except Exception as error:  # each kind of damaged file raises another kind
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"No image processor can be made of {where!r}: {why}") from error
