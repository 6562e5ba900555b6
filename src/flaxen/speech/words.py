"""What Whisper's own tokens are: languages, tasks, timestamps, and the beginning of a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flaxen.core.errors import ConfigError, InputError, did_you_mean

TASKS = ("transcribe", "translate")


@dataclasses.dataclass(frozen=True)
class Words:
    """Token ids. start: begins every text; end: ends it, and words stand below it; silent: says
    that times are left out, those follow it; languages: by code, none for a model of English only;
    tasks: by name; latest: how many steps after 0.00 s the first timestamp may stand.
    """

    start: int
    end: int
    silent: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    latest: int | None = None

    @property
    def times(self) -> int:
        """0.00 s."""
        return self.silent + 1

    @property
    def nothing(self) -> int:
        """Says that nobody speaks."""
        return self.silent - 1

    def prompt(self, language: str | None, task: str, timed: bool) -> list[int]:
        """How a text begins; a language may be left out where there is only one."""
        begun = [self.start]
        if self.languages and language is not None:
            begun += [self.languages[language], self.tasks[task]]
        return begun if timed else [*begun, self.silent]

    def checked(self, language: str | None, task: str) -> str | None:
        """The code of a language, given as that or by its English name.

        Raises:
            InputError: for a language or task that this model does not know.
        """
        if task not in TASKS:
            raise InputError(f"task is {task!r}; expected one of {', '.join(TASKS)}.")
        if not self.languages and (task != "transcribe" or _code(language) not in (None, "en")):
            raise InputError(
                "This model knows English only, and transcribes it; leave out language and task, "
                "or use a multilingual one."
            )
        if language is None or not self.languages:
            return None
        code = _code(language)
        if code not in self.languages:
            near = did_you_mean(language, self.languages)
            raise InputError(f"language is {language!r}, which this model does not know.{near}")
        return code


def _code(language: str | None) -> str | None:
    if language is None:
        return None
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    return TO_LANGUAGE_CODE.get(language.lower(), language.lower())


def words_of(model: Any, tok: Any) -> Words:
    """The tokens of a model, from its generation config, or else by their names.

    Raises:
        ConfigError: for a model that lacks some.
    """
    said, config = model.generation_config or {}, model.config
    known = tok.get_vocab()

    def first(*found: Any) -> Any:
        return next((x for x in found if x is not None), None)

    end = first(said.get("eos_token_id"), config.eos_token_id)
    end = end[0] if isinstance(end, list | tuple) else end
    start = first(said.get("decoder_start_token_id"), config.decoder_start_token_id)
    silent = first(said.get("no_timestamps_token_id"), known.get("<|notimestamps|>"))
    if None in (start, end, silent):
        raise ConfigError(
            "Nothing says which tokens begin and end a text and which one leaves times out: found "
            f"{start}, {end} and {silent}. Put generation_config.json and tokenizer.json beside "
            "the weights."
        )
    many = first(said.get("is_multilingual"), config.vocab_size >= 51865)
    languages = said.get("lang_to_id") or {
        name: i for name, i in known.items() if start < i < silent and len(name) in (6, 7)
    }
    tasks = said.get("task_to_id") or {x: known[f"<|{x}|>"] for x in TASKS if f"<|{x}|>" in known}
    return Words(
        start=start,
        end=end,
        silent=silent,
        languages={name.strip("<|>"): i for name, i in languages.items()} if many else {},
        tasks=tasks,
        latest=said.get("max_initial_timestamp_index"),
    )
