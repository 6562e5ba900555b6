"""`flaxen chat`: a conversation that keeps its cache from turn to turn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from flaxen.cli.answer import Answer, answer
from flaxen.cli.options import Count, Loading, Sampling, Source, about
from flaxen.cli.output import remark, write_now
from flaxen.core.errors import InputError
from flaxen.core.whole_file import whole_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from flaxen.model import Model

HELP = "/reset begins again, /system TEXT sets the system prompt, /save FILE, /exit"


def chat(
    model: Source,
    *,
    max_tokens: Annotated[Count, about("At most so many tokens in one answer.")] = 1024,
    stop: Annotated[list[str] | None, about("Stop before this text; may be repeated.")] = None,
    system_prompt: Annotated[str | None, about("What the model is told about itself.")] = None,
    loading: Loading = Loading(),
    sampling: Sampling = Sampling(),
) -> None:
    """Talk with a model, turn by turn."""

    tok = loading.tokenizer(model)
    if tok.chat_template is None:
        raise InputError("This model has no chat template; use `flaxen generate --raw`.")
    loaded = loading.load(model)
    options = {"max_tokens": max_tokens, "stop": stop or (), "sampling": sampling.given()}
    remark(HELP)
    converse(Conversation(loaded, tok, options, system_prompt), read=input)


class Conversation:
    """Messages so far, and a cache that holds the tokens of the last rendering."""

    def __init__(
        self,
        model: Model,
        tok: PreTrainedTokenizerFast,
        options: dict[str, Any],
        system: str | None = None,
    ):
        self.model, self.tok, self.options = model, tok, options
        self.begin(system)

    def begin(self, system: str | None) -> None:
        """Forget everything but the system prompt."""
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.drop_cache()

    def drop_cache(self) -> None:
        """Compute everything again at the next turn; the messages stay."""
        self._cache: Any = None
        self._held: list[int] = []

    def say(self, text: str, write: Callable[[str], object]) -> Answer:
        """One turn. Only tokens that the cache does not hold are computed."""
        from flaxen.text import encode_chat

        messages = [*self.messages, {"role": "user", "content": text}]
        ids = encode_chat(self.tok, messages, system=self.system)
        # Some templates change earlier turns (they drop thoughts): then the cache is of no use.
        kept = len(self._held) if ids[: len(self._held)] == self._held else 0
        found = answer(
            self.model,
            self.tok,
            ids[kept:],
            cache=self._cache if kept else None,
            write=write,
            **self.options,
        )
        self.messages = [*messages, {"role": "assistant", "content": found.text}]
        # The stream's cache holds the prompt and every token that was given out.
        self._cache, self._held = found.stream.cache, [*ids, *found.ids]
        return found

    def save(self, path: str) -> None:
        """Write the messages as one line that `flaxen train` reads."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        line = json.dumps({"messages": [*system, *self.messages]}, ensure_ascii=False)
        try:
            with whole_file(Path(path).expanduser()) as aside:
                aside.write_text(line + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"Cannot write {path!r}: {error.strerror}.") from error


def converse(talk: Conversation, read: Callable[[str], str]) -> None:
    """Read lines until /exit or the end of the input."""
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            return
        command, _, rest = line.partition(" ")
        match command:
            case "":
                pass
            case "/exit" | "/quit":
                return
            case "/reset":
                talk.begin(talk.system)
                remark("Begun again.")
            case "/system":
                talk.begin(rest or None)
                remark("Begun again with this system prompt." if rest else "Begun again without.")
            case "/save" if rest:
                _save(talk, rest)
            case _ if command.startswith("/"):
                remark(f"No such command: {command}. {HELP}")
            case _:
                _turn(talk, line)


def _save(talk: Conversation, path: str) -> None:
    """The conversation goes on, whether or not the file could be written."""
    try:
        talk.save(path)
        remark(f"Saved to {path}.")
    except InputError as error:
        remark(str(error))


def _turn(talk: Conversation, line: str) -> None:
    """An answer; Ctrl-C ends it, not the conversation."""
    try:
        found = talk.say(line, write_now)
    except KeyboardInterrupt:
        talk.drop_cache()
        remark("\nStopped; this turn is forgotten.")
        return
    write_now("\n")
    remark(found.line())
