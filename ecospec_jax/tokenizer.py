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
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = sorted({*range(0x100)} - {*_PRINTABLE})
# The characters that stand for bytes in byte-level vocabularies: printable Latin-1 for itself, then 256 and on.
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + place): byte for place, byte in enumerate(_OTHERS)}
_CHARACTERS = {byte: character for character, byte in _BYTES.items()}


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

    @property
    def vocabulary(self) -> dict[int, str]:
        """The tokens by id, as the tokenizer's files write them."""
        return {token_id: token for token, token_id in self._backend.get_vocab().items()}

    @property
    def filler(self) -> int:
        """A token that stands for nothing: the unknown one, else the end of sequence, else id 0."""
        return next((i for i in (self._backend.unk_token_id, self._backend.eos_token_id) if i is not None), 0)

    def token_bytes(self) -> dict[int, bytes]:
        """The bytes that each token of a byte-level vocabulary stands for; added tokens stand for their names."""
        added = self._backend.added_tokens_decoder
        texts = {}
        for token_id, token in self.vocabulary.items():
            if token_id in added:
                texts[token_id] = str(added[token_id]).encode()
            elif all(character in _BYTES for character in token):
                texts[token_id] = bytes(_BYTES[character] for character in token)
            else:
                raise UserError(f"{self._folder}: token {token_id}, {token!r}, is not of a byte-level vocabulary")
        return texts

    def encode_bytes(self, data: bytes) -> list[int]:
        """Token ids of bytes; those that are no text go to the byte-level vocabulary without further ado."""
        try:
            return self.encode(data.decode())
        except UnicodeDecodeError:
            model = self._backend.backend_tokenizer.model
            return [token.id for token in model.tokenize("".join(_CHARACTERS[byte] for byte in data))]

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
