"""`flaxen transcribe`: what is said in a WAV file."""

from __future__ import annotations

from typing import Annotated

from flaxen.cli.options import Count, Json, Loading, Source, about
from flaxen.cli.output import print_json, remark, write_now


def transcribe(
    model: Source,
    file: Annotated[str, about("A WAV file, of any rate and number of channels.")],
    *,
    language: Annotated[str | None, about("A code or a name, as en; default: listens.")] = None,
    task: Annotated[str, about("transcribe, or translate into English.")] = "transcribe",
    timestamps: Annotated[bool, about("Print from when to when each piece was said.")] = False,
    max_tokens: Annotated[Count | None, about("At most so many tokens a window.")] = None,
    loading: Loading = Loading(),
    json: Json = False,
) -> None:
    """Write down what is said in a WAV file, with a Whisper model.

    The text goes to standard output, the language and the time it took to standard error.
    """
    import time

    from flaxen.speech import read_wav

    samples, rate = read_wav(file)
    loaded = loading.load(model)
    start = time.perf_counter()
    found = loaded.transcribe(
        samples,
        rate=rate,
        language=language,
        task=task,
        timestamps=timestamps,
        max_new_tokens=max_tokens,
        tokenizer=loading.tokenizer(model),
    )
    took = time.perf_counter() - start
    if json:
        print_json(found.as_dict() | {"took": took})
        return
    if timestamps:
        for piece in found.segments:
            write_now(f"[{clock(piece.start)} --> {clock(piece.end)}]{piece.text}\n")
    else:
        write_now(found.text.strip() + "\n")
    heard = f"{found.language}, " if found.language else ""
    remark(f"{heard}{found.seconds:.1f} s of audio in {took:.1f} s")


def clock(seconds: float) -> str:
    """3725.5 -> 01:02:05.500"""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours:02}:{minutes:02}:{rest:06.3f}"
