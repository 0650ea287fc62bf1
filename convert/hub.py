"""Where a source comes from: a folder here, or the Hugging Face Hub."""

import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download

from ecospec_jax.errors import UserError, reported_as_user_error

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "nextn_layer_parameters.safetensors",  # DeepSeek's MTP module, exported alone
    "model.safetensors.index.json",
)
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def local_folder(source: str | Path, files: Sequence[str] = (*MODEL_FILES, *TOKENIZER_FILES)) -> Path:
    """The folder itself, or the Hub's `files` in the local cache (downloaded if need be)."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    if isinstance(source, Path) or folder.exists() or not _HUB_ID.fullmatch(source):
        raise UserError(f"{source}: no such folder")
    # Below the Hub's client lies an HTTP library, with errors of its own.
    with reported_as_user_error(f"{source}: no such folder, and not to be had from the Hugging Face Hub", Exception):
        return Path(snapshot_download(source, allow_patterns=list(files)))
