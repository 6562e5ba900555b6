"""A picture from a file."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from flaxen.core.errors import InputError


def open_picture(path: str | os.PathLike[str]) -> Any:
    """The picture in a file, in RGB and turned upright, as Pillow has it.

    Raises:
        InputError: there is no file, it is no picture, or Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise InputError("Pictures need Pillow: pip install 'flaxen[image]'.") from error
    where = Path(path).expanduser()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(where) as opened:
                return _rgb(ImageOps.exif_transpose(opened), where)
    except InputError:
        raise
    except UnidentifiedImageError as error:
        raise InputError(
            f"{where} is no picture; expected a file such as PNG, JPEG or WebP."
        ) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(f"{where} is too large a picture: {error}") from error
    except (OSError, SyntaxError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{where} cannot be read as a picture: {why}.") from error


def _rgb(picture: Any, where: Path) -> Any:
    """Grey levels of 16 bits are scaled to 8; Pillow itself would make those above 255 white.

    Raises:
        InputError: grey levels of 32 bits, of which nobody says what is white.
    """
    if picture.mode in ("I", "F"):
        raise InputError(
            f"{where} holds grey levels as 32-bit numbers (mode {picture.mode}), whose white is "
            "not known; convert it to 8 or 16 bits."
        )
    if picture.mode.startswith("I;16"):
        # Through numbers of 32 bits, as Pillow does no arithmetic on 16.
        picture = picture.convert("I").point(lambda level: level * (1 / 257) + 0.5).convert("L")
    return picture.convert("RGB")
