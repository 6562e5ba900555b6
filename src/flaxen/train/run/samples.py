"""Answers to a few prompts while a run goes on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flaxen.core.errors import InputError
from flaxen.generate import generate
from flaxen.generate.settings import resolve
from flaxen.models.skeleton import only_generating
from flaxen.shard.host import from_first
from flaxen.text import decode, encode, encode_chat
from flaxen.train.run.log import Log
from flaxen.train.settings import TrainConfig

ANSWERS = "samples.jsonl"

FORMS = '{"prompt": "..."} or {"messages": [...]}'


@dataclasses.dataclass(frozen=True)
class Prompt:
    """text: as people read it; ids: as the model does."""

    text: str
    ids: list[int]


def sample_prompts(config: TrainConfig, model: Any, tok: Any) -> list[Prompt]:
    """What `sample_prompts` asks for.

    A prompt goes through the chat template if there is one, unless `sample_raw` says no. A .txt
    file has one in each line; a .jsonl file an object with `prompt`, or with `messages`.

    Raises:
        InputError: a file that cannot be read or has a bad line, an empty prompt, or a model that
            does not generate.
    """
    asked = config.sample_prompts
    if asked is None:
        return []
    only_generating(model.module, "answer sample_prompts")
    texts = _from_file(Path(asked)) if isinstance(asked, str) else list(asked)
    if len(texts) == 1 and isinstance(texts[0], str) and Path(texts[0]).is_file():
        texts = _from_file(Path(texts[0]))
    prompts = [_prompt(x, tok, config.sample_raw) for x in texts]
    empty = [i for i, prompt in enumerate(prompts, 1) if not prompt.ids]
    if empty or not prompts:
        which = f"prompt {empty[0]} is empty" if empty else "there is none"
        raise InputError(f"sample_prompts: {which}; expected some text in each.")
    return prompts


def sample(
    prompts: Sequence[Prompt], model: Any, tok: Any, tokens: int, log: Log, step: int
) -> None:
    """Answer all prompts greedily, in one batch, and write the answers into samples.jsonl beside
    the log: each with step, number, prompt and text.
    """
    path = log.path.with_name(ANSWERS)
    answers = Log(path, step)
    if from_first(float(any(row["step"] == step for row in answers.rows()))):
        return
    width = max(len(prompt.ids) for prompt in prompts)
    ids = np.zeros((len(prompts), width), np.int32)
    mask = np.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt.ids) :] = prompt.ids
        mask[i, width - len(prompt.ids) :] = 1
    said = generate(model, ids, mask, max_new_tokens=tokens, do_sample=False)[:, width:]
    if not answers.first:
        return
    ends = resolve(model, width, {"max_new_tokens": tokens}).eos_token_id
    for i, (prompt, new) in enumerate(zip(prompts, said.tolist(), strict=True)):
        stop = next((n for n, token in enumerate(new) if token in ends), len(new))
        row = {"step": step, "number": i, "prompt": prompt.text, "text": decode(tok, new[:stop])}
        answers.write(row)
        for listener in log.listeners:
            listener.sample(row)


def _prompt(given: Any, tok: Any, raw: bool) -> Prompt:
    if isinstance(given, str):
        if raw or not tok.chat_template or not given.strip():
            return Prompt(given, encode(tok, given) if given.strip() else [])
        return Prompt(given, encode_chat(tok, [{"role": "user", "content": given}]))
    if not _is_chat(given):
        raise InputError(f"sample_prompts has {given!r}; expected text, or a list of messages.")
    last = given[-1]["content"]
    return Prompt(last if isinstance(last, str) else json.dumps(last), encode_chat(tok, given))


def _from_file(path: Path) -> list[Any]:
    """Texts, or lists of messages."""
    if path.suffix not in (".txt", ".jsonl"):
        raise InputError(
            f"sample_prompts is {str(path)!r}; expected a list of prompts, or a .txt or .jsonl "
            "file of them."
        )
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"sample_prompts: {path} cannot be read: {error}.") from error
    filled = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if path.suffix == ".txt":
        return [line for _, line in filled]
    return [_read(f"{path}:{n}", line) for n, line in filled]


def _read(where: str, line: str) -> Any:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is no JSON ({error}); expected {FORMS}.") from None
    if isinstance(found, dict) and isinstance(found.get("prompt"), str):
        return found["prompt"]
    messages = found.get("messages") if isinstance(found, dict) else None
    if _is_chat(messages):
        return messages
    raise InputError(f"{where} is {line[:80]!r}; expected {FORMS}.")


def _is_chat(messages: Any) -> bool:
    whole = lambda x: isinstance(x, dict) and {"role", "content"} <= x.keys()
    return isinstance(messages, list) and bool(messages) and all(map(whole, messages))
