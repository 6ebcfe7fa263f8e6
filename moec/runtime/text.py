"""Text to tokens and back, by the tokenizer.json of a model folder; prompts from the command line and from files.

No torch here: prompts are read and refused before any rank starts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from moec.checkpoint.json import MIB, read_json_object
from moec.diagnostics import MoecError, fail

MAX_PROMPTS = 64 * MIB
_REPLACEMENT = "\ufffd"


class Text:
    """The tokenizer of a model folder. A folder without one can still run on token ids."""

    def __init__(self, folder: Path) -> None:
        """Raises E0613 for a tokenizer.json that cannot be read."""
        self.path = folder / "tokenizer.json"
        self._tokenizer = _read_tokenizer(self.path) if self.path.is_file() else None

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the tokenizer's post-processor adds. Raises E0613, E0615."""
        if self._tokenizer is None:
            raise fail("E0613", f"there is no tokenizer at `{self.path}`", "give --tokens 1,2,3 instead of text")
        if any("\ud800" <= c <= "\udfff" for c in text):  # what Python makes of bytes that are not UTF-8
            raise fail("E0615", f"`{text[:80]}` is no prompt: it is not UTF-8", "give text that is, or --tokens 1,2,3")
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str | None:
        """The text of token ids without special tokens; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


class TextStream:
    """The text of one sequence as its tokens come. A character in several tokens comes out when it is whole."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._tokens: list[int] = []
        self._context = 0  # decode from here: a token's text may depend on the one before it
        self._shown = 0  # tokens whose text has come out

    def push(self, token: int, is_last: bool = False) -> str:
        """The text that one more token completes, often the empty string; everything left with the last token."""
        self._tokens.append(token)
        before = self._text.decode(self._tokens[self._context : self._shown])
        now = self._text.decode(self._tokens[self._context :])
        if before is None or now is None:
            return f"{token} "
        if now.endswith(_REPLACEMENT) and not is_last:
            return ""
        self._context, self._shown = self._shown, len(self._tokens)
        return now[len(before) :]


def read_eos(folder: Path) -> frozenset[int]:
    """Ids that end a sequence: `eos_token_id` of generation_config.json, else of config.json (a number or a list).

    Raises E0624 for anything else: without the end a model talks on.
    """
    for name in ("generation_config.json", "config.json"):
        if not (folder / name).is_file():
            continue
        found = read_json_object(folder / name, "E0714", "config", MIB)[0].get("eos_token_id")
        tokens = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(token) is int and token >= 0 for token in tokens):
            what = f"`eos_token_id` in `{folder / name}` is {json.dumps(found)[:80]}, not a token id or a list of them"
            raise fail("E0624", what, "fetch the model's own file, or pass --ignore-eos")
        if tokens:
            return frozenset(tokens)
    return frozenset()


def read_prompts(path: Path, text: Text) -> list[list[int]]:
    """Token ids of the prompts in a JSONL file: one object a line, `{"prompt": "..."}` or `{"tokens": [1, 2]}`.

    Raises:
        MoecError: E0615, the file or a line cannot be used.
    """
    try:
        if path.stat().st_size > MAX_PROMPTS:
            raise _bad_file(path, f"it is larger than {MAX_PROMPTS // MIB} MiB")
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise _bad_file(path, str(reason)) from error
    found = [_prompt(line, f"{path}:{number}", text) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise _bad_file(path, "it holds none")
    return found


def parse_tokens(text: str) -> list[int]:
    """`1,2,3` as numbers. Raises E0614 for anything else."""
    parts = text.split(",") if text.strip() else []
    if not all(part.strip().isascii() and part.strip().isdecimal() and len(part) < 12 for part in parts):
        raise fail("E0614", f"`{text[:80]}` is not a list of token ids", "write them as 1,2,3")
    return [int(part) for part in parts]


def _prompt(line: str, where: str, text: Text) -> list[int]:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _bad_line(where, "it is not JSON") from error
    if not isinstance(value, dict) or len(value) != 1:
        raise _bad_line(where, "it is not an object with one key")
    tokens = value.get("tokens")
    if isinstance(tokens, list) and all(type(token) is int for token in tokens):
        return tokens
    if isinstance(value.get("prompt"), str):
        return text.encode(value["prompt"])
    raise _bad_line(where, "it has neither a text `prompt` nor a list of numbers `tokens`")


def _bad_line(where: str, why: str) -> MoecError:
    return fail("E0615", f"{where} is no prompt: {why}", 'write {"prompt": "..."} or {"tokens": [1, 2]} on each line')


def _bad_file(path: Path, why: str) -> MoecError:
    return fail("E0615", f"the prompts in `{path}` cannot be read: {why}", "give --prompts a JSONL file")


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise fail("E0613", f"`{path}` is not a tokenizer: {str(error)[:200]}", "fetch it again") from error
