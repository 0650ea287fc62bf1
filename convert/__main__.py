"""`python -m convert SRC DST`."""

import functools
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import track
from tyro.conf import Positional, arg

from convert import AuxOffset, convert
from ecospec_jax.errors import run_command


def main(
    src: Annotated[Positional[str], arg(metavar="SRC")],
    dst: Annotated[Positional[Path], arg(metavar="DST")],
    /,
    drafter: str | None = None,
    tokenizer: str | None = None,
    aux_offset: AuxOffset = "auto",
) -> None:
    """Convert a Hugging Face checkpoint into DST: target, drafter, tokenizer, manifest.

    An interrupted conversion resumes when run again. DST appears only when it is complete.

    Args:
        src: Target: a folder, or an id on the Hugging Face Hub. For a folder that was converted before, the drafter is
            converted alone; other commands take DST as --drafter.
        dst: Folder to write; must not exist.
        drafter: EAGLE-3 head for the target: a folder or Hub id. Or a DeepSeek-V3 checkpoint, SRC itself for one: its
            MTP module.
        tokenizer: Where tokenizer and generation_config.json are, if not in SRC: a folder or Hub id.
        aux_offset: What to add to an EAGLE-3 head's list of layers to get boundaries (boundary b is the input of
            layer b). 'auto': 1 for a list in 'eagle_config' (0 if it names the number of layers), 0 for one at the top
            level.
    """
    progress = functools.partial(track, description="converting", console=Console(stderr=True))
    manifest = convert(src, dst, drafter=drafter, tokenizer=tokenizer, aux_offset=aux_offset, progress=progress)
    print(f"{dst}: {len(manifest.pieces)} pieces, source hash {manifest.source_hash[:12]}")


if __name__ == "__main__":
    run_command(lambda: tyro.cli(main, prog="python -m convert"))
