"""Text to token ids and back, with the chat template that was published with the checkpoint."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from ecospec_jax.errors import UserError, reported_as_user_error

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would advise to install PyTorch

from transformers import AutoTokenizer  # noqa: E402

_INCOMPLETE = "\ufffd"  # what the bytes of an unfinished character decode to


class Tokenizer:
    """A checkpoint's tokenizer."""

    def __init__(self, backend: Any, folder: Path) -> None:
        """Wraps a transformers tokenizer that was loaded from `folder`."""
        self._backend, self._folder = backend, folder

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Reads the tokenizer files of a folder."""
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder, so no tokenizer")
        # The tokenizers library raises plain `Exception` for a damaged tokenizer.json.
        with reported_as_user_error(f"{folder}: cannot load the tokenizer", Exception):
            return cls(AutoTokenizer.from_pretrained(folder, local_files_only=True), folder)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return 1 + max(self._backend.get_vocab().values())

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, without special tokens around it."""
        return self._backend.encode(text, add_special_tokens=False)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation (`role` and `content` each), ready for the assistant's next answer."""
        if self._backend.chat_template is None:
            raise UserError(f"{self._folder}: the tokenizer has no chat template")
        with reported_as_user_error(f"{self._folder}: the chat template refuses the messages", jinja2.TemplateError):
            return self._backend.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=False
            )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> "TextStream":
        """Decodes one text bit by bit."""
        return TextStream(self)


class TextStream:
    """Incremental decoding: the returned pieces join to the text of all ids, and none ends inside a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """An empty text."""
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # those of the last returned piece, as context, then those not yet returned
        self._returned = 0

    def push(self, ids: Sequence[int]) -> str:
        """Adds token ids; returns the text that is now complete."""
        self._ids.extend(ids)
        text = self._rest()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        del self._ids[: self._returned]
        self._returned = len(self._ids)
        return text

    def close(self) -> str:
        """Returns what was held back: the replacement characters of an unfinished character, if any."""
        return self._rest()

    def _rest(self) -> str:
        known = self._tokenizer.decode(self._ids[: self._returned])
        return self._tokenizer.decode(self._ids)[len(known) :]
