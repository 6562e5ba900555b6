"""`flaxen transcribe`: what is said in WAV files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from flaxen.cli.options import Count, Json, Loading, Source, about
from flaxen.cli.output import print_json, remark, write_now
from flaxen.core.errors import InputError

if TYPE_CHECKING:
    from flaxen.speech.transcribe import Transcript


def transcribe(
    model: Source,
    files: Annotated[
        tuple[str, ...],
        about("WAV files, of any rate and number of channels.", show_default=False),
    ] = (),
    *,
    language: Annotated[str | None, about("A code or a name, as en; default: listens.")] = None,
    task: Annotated[str, about("transcribe, or translate into English.")] = "transcribe",
    timestamps: Annotated[bool, about("Print from when to when each piece was said.")] = False,
    max_tokens: Annotated[Count | None, about("At most so many tokens a window.")] = None,
    loading: Loading = Loading(),
    json: Json = False,
) -> None:
    """Write down what is said in WAV files, with a Whisper model.

    The text goes to standard output, the language and the time it took to standard error. Of
    several files, each text comes under the name of its file, and --json gives one object a line.
    """
    import time

    from flaxen.speech import read_wav

    if not files:
        raise InputError("There is no file; give one WAV file or several.")
    for file in files:
        read_wav(file)  # what cannot be read is said before anything takes long
    loaded, tok = loading.load(model), loading.tokenizer(model)
    for i, file in enumerate(files):
        samples, rate = read_wav(file)
        start = time.perf_counter()
        found = loaded.transcribe(
            samples,
            rate=rate,
            language=language,
            task=task,
            timestamps=timestamps,
            max_new_tokens=max_tokens,
            tokenizer=tok,
        )
        took = time.perf_counter() - start
        if json:
            told = found.as_dict() | {"took": took}
            print_json({"file": file} | told, lines=len(files) == 1)
            continue
        if len(files) > 1:
            write_now(f"\n{file}:\n" if i else f"{file}:\n")
        write_now(_text(found, timestamps))
        heard = f"{found.language}, " if found.language else ""
        remark(f"{heard}{found.seconds:.1f} s of audio in {took:.1f} s")


def _text(found: Transcript, timestamps: bool) -> str:
    if not timestamps:
        return found.text.strip() + "\n"
    pieces = found.segments
    return "".join(f"[{clock(x.start)} --> {clock(x.end)}]{x.text}\n" for x in pieces)


def clock(seconds: float) -> str:
    """3725.5 -> 01:02:05.500"""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours:02}:{minutes:02}:{rest:06.3f}"
