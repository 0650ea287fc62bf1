"""A byte-level BPE trained on a text, with the special tokens and the chat template of a published family."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# As Qwen and gpt-oss split text, with every digit on its own.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class ChatFormat:
    """How a family writes conversations.

    Attributes:
        padding: special token that fills up.
        specials: all others.
        end: the one behind an answer.
        template: Jinja template of a conversation; with `add_generation_prompt` an answer's text comes next.
    """

    padding: str
    specials: tuple[str, ...]
    end: str
    template: str


HARMONY = ChatFormat(
    padding="<|endoftext|>",
    specials=("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
    end="<|return|>",
    template=(
        "{% for m in messages %}{{ '<|start|>' + m['role'] }}"
        "{% if m['role'] == 'assistant' %}{{ '<|channel|>final' }}{% endif %}"
        "{{ '<|message|>' + m['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant<|channel|>final<|message|>' }}{% endif %}"
    ),
)
"""gpt-oss's, answering in the final channel at once."""
DEEPSEEK = ChatFormat(
    padding="<｜▁pad▁｜>",
    specials=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "</think>"),
    end="<｜end▁of▁sentence｜>",
    template=(
        "{{ '<｜begin▁of▁sentence｜>' }}{% for m in messages %}"
        "{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
        "{% elif m['role'] == 'assistant' %}{{ '<｜Assistant｜></think>' + m['content'] + '<｜end▁of▁sentence｜>' }}"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜></think>' }}{% endif %}"
    ),
)
"""DeepSeek-V3.1's, answering without thinking."""


def train_tokenizer(texts: Iterable[str], vocab_size: int, chat: ChatFormat, max_tokens: int, folder: Path) -> None:
    """Writes a tokenizer of exactly `vocab_size` ids into a folder; too little text for so many is a ValueError."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[chat.padding, *chat.specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the text gives {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    tokenizer.save(str(folder / TOKENIZER_FILES[0]))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": chat.end,
        "pad_token": chat.padding,
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat.template,
    }
    (folder / TOKENIZER_FILES[1]).write_text(json.dumps(values, indent=1) + "\n")
