"""The `flaxen` command: a subcommand's file is imported when it is called, and jax not before."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flaxen import __version__
from flaxen.core.errors import FlaxenError

if TYPE_CHECKING:
    from cyclopts import App

COMMANDS = {
    "generate": "Answer one prompt, or continue a text.",
    "chat": "Talk with a model, turn by turn.",
    "transcribe": "Write down what is said in WAV files.",
    "embed": "One vector for each text, and how alike they are.",
    "data": "Show what is learned from: one example with its loss, or all in numbers.",
    "train": "Fine-tune a model, in full or with low-rank adapters.",
    "plot": "Draw the curves of runs, side by side.",
    "convert": "Write a checkpoint as a Hugging Face folder.",
    "quantize": "Round weights to 8 or 4 bits: what it costs and saves, and a folder of it.",
    "diff": "Tell whether two checkpoints are equal, and how far apart they are.",
    "show": "Print the parts of a model, their sizes and where they would lie.",
    "plan": "Tell whether a run fits and what it costs, before any weight is read.",
    "doctor": "Tell whether a model loads, is understood in full, and fits.",
    "families": "List the model types that load, or print a starting file for a new one.",
    "bench": "Measure prefill and decode on this machine.",
    "demo": "The whole way with a real model: answer, convert, shard, fine-tune, save.",
}

EXTRAS = {
    "optax": "train",
    "grain": "train",
    "pyarrow": "parquet",
    "datasets": "data",
    "gguf": "gguf",
    "matplotlib": "show",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and give its exit status: 2 for what the user can mend, 130 after Ctrl-C.

    With FLAXEN_TRACEBACK=1 in the environment every error comes with its traceback. One of several
    processes ends here after an error.
    """
    try:
        status = _status(arguments)
    except Exception:
        if not _joined():
            raise
        traceback.print_exc()
        print("If another process was lost, its own output says why.", file=sys.stderr)
        status = 1
    if status in (1, 2) and _joined():
        from flaxen.shard.processes import leave

        leave(status)
    return status


def _joined() -> bool:
    if "jax" not in sys.modules:
        return False
    from flaxen.shard.processes import joined

    return joined()


def _status(arguments: Sequence[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A file or an old terminal may be of an encoding without our marks.
            stream.reconfigure(errors="replace")
    try:
        result = application()(arguments)
        _flush()
    except FlaxenError as error:
        return _mendable(error, str(error))
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(error.name or "")
        if extra is None:
            raise
        return _mendable(error, f"{error.name} is not installed: pip install 'flaxen[{extra}]'")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except OSError as error:
        full = error.errno == errno.ENOSPC and error.filename is None
        if not full and not isinstance(error, BrokenPipeError):
            raise
        # Whoever read our output has left; without this, Python complains once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _mendable(error, f"What is printed goes to a full disk: {error}") if full else 141
    return result if isinstance(result, int) else 0


def _flush() -> None:
    """There is no stdout where it was closed."""
    if sys.stdout is not None:
        sys.stdout.flush()


def application() -> App:
    """The command line as cyclopts sees it."""
    from cyclopts import App, Parameter

    app = App(
        name="flaxen",
        version=__version__,
        help="Hugging Face models in JAX: load, run, train, and give back byte for byte.",
        default_parameter=Parameter(negative=()),
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for name, text in COMMANDS.items():
        app.command(f"flaxen.cli.{name}:{name}", name=name, help=text)
    return app


def _mendable(error: Exception, message: str) -> int:
    if os.environ.get("FLAXEN_TRACEBACK") == "1":
        raise error
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text(f"Error: {message}", style="bold red"))
    return 2
