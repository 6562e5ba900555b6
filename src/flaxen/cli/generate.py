"""`flaxen generate`: one prompt, one answer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from flaxen.cli.answer import answer
from flaxen.cli.options import Count, Json, Loading, Sampling, Source, about, no_option
from flaxen.cli.output import print_json, remark, write_now
from flaxen.core.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from flaxen.model import Model


def generate(
    model: Source,
    prompt: Annotated[
        str,
        about(
            "The prompt, or - to read it from standard input.",
            allow_leading_hyphen=True,
            validator=no_option,
        ),
    ] = "-",
    *,
    max_tokens: Annotated[Count, about("At most so many new tokens.")] = 512,
    stop: Annotated[list[str] | None, about("Stop before this text; may be repeated.")] = None,
    system_prompt: Annotated[str | None, about("What the model is told about itself.")] = None,
    raw: Annotated[bool, about("Continue the text as it is, without the chat template.")] = False,
    image: Annotated[
        list[str] | None, about("A picture that comes before the text; may be repeated.")
    ] = None,
    loading: Loading = Loading(),
    sampling: Sampling = Sampling(),
    json: Json = False,
) -> None:
    """Answer one prompt, or continue a text.

    The text goes to standard output as it comes, speed and memory to standard error.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise InputError(
            "The prompt is empty; give it as the second argument or on standard input."
        )

    pictures = opened(image) if image else []
    tok = loading.tokenizer(model)
    if tok.chat_template is None and not raw:
        raw = reads_plain_texts(loading.look(model, download=True).module)
    ids, given = prompt_ids(tok, text, system_prompt, raw, pictured=bool(pictures)), {}
    loaded = loading.load(model)
    from flaxen.models.seq2seq import Seq2Seq

    if isinstance(loaded.module, Seq2Seq):
        if pictures:
            raise no_pictures(loaded)
        whole_answer(loaded, tok, ids, max_tokens, sampling.given(), stop, json)
        return
    if pictures:
        ids, given = with_pictures(
            loaded, tok, model, pictures, text, system_prompt, raw, loading.revision
        )
    found = answer(
        loaded,
        tok,
        ids,
        pictures=given,
        max_tokens=max_tokens,
        sampling=sampling.given(),
        stop=stop or (),
        write=(lambda text: None) if json else write_now,
    )
    if json:
        print_json(found.as_dict())
    else:
        write_now("\n")
        remark(found.line())


def opened(files: Sequence[str]) -> list[Any]:
    """The pictures in files, before anything that takes long."""
    from flaxen.image import open_picture

    return [open_picture(file) for file in files]


def reads_plain_texts(module: Any) -> bool:
    """Whether a model without a chat template answers texts as they are, as an encoder-decoder
    does.

    Raises:
        InputError: a model that gives no text.
    """
    from flaxen.models.seq2seq import Seq2Seq
    from flaxen.models.skeleton import only_generating

    if isinstance(module, Seq2Seq):
        return True
    only_generating(module, "generate")
    return False


def no_pictures(loaded: Model) -> InputError:
    return InputError(f"This model is {loaded.module.kind()}: it takes no pictures (--image).")


def with_pictures(
    loaded: Model,
    tok: PreTrainedTokenizerFast,
    source: str,
    pictures: list[Any],
    text: str,
    system: str | None,
    raw: bool,
    revision: str | None,
) -> tuple[list[int], dict[str, Any]]:
    """The tokens of a prompt with pictures, and these as arrays."""
    from flaxen.image import image_processor, pictured_prompt

    if not loaded.module.pictured():
        raise no_pictures(loaded)
    processor = image_processor(source, revision=revision)
    return pictured_prompt(loaded, tok, processor, pictures, text, system=system, raw=raw)


def whole_answer(
    model: Model,
    tok: PreTrainedTokenizerFast,
    ids: list[int],
    max_tokens: int,
    settings: dict[str, Any],
    stop: list[str] | None,
    json: bool,
) -> None:
    """What an encoder-decoder says: it comes at once."""
    from flaxen.text import decode

    if model.module.takes()[0] != "input_ids":
        raise InputError(
            f"This model reads {model.module.takes()[0]}, and no text; for speech there is "
            "`flaxen transcribe`."
        )
    if stop:
        raise InputError("--stop is for models that go on with a text; this one answers it.")
    found = model.generate([ids], max_new_tokens=max_tokens, **settings)[0].tolist()
    text = decode(tok, found)
    if json:
        print_json({"text": text, "tokens": found})
    else:
        write_now(f"{text}\n")


def prompt_ids(
    tok: PreTrainedTokenizerFast,
    text: str,
    system_prompt: str | None,
    raw: bool,
    pictured: bool = False,
) -> list[int]:
    """The tokens of a prompt, through the chat template unless it is raw; none yet of one with
    pictures, which waits for the model.
    """
    from flaxen.text import encode, encode_chat

    if raw and system_prompt is not None:
        raise InputError("--system-prompt needs the chat template, which --raw leaves out.")
    if raw:
        return [] if pictured else encode(tok, text)
    if tok.chat_template is None:
        raise InputError(
            "This model has no chat template; add --raw to continue the text as it is."
        )
    if pictured:
        return []
    return encode_chat(tok, [{"role": "user", "content": text}], system=system_prompt)
