"""Write a prompt file of documented Python functions from installed packages: text to train a small model on.

    python -m experiments.collect_functions --packages stdlib numpy networkx --out functions.jsonl

A prompt is a function's signature and docstring, its answer the rest.
"""

import ast
import importlib.util
import json
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

from ecospec_jax import UserError
from ecospec_jax.errors import reported_as_user_error, run_command
from experiments.tables import write_text

STDLIB = "stdlib"
_SKIPPED = {"test", "tests", "idlelib", "site-packages", "lib2to3"}


@dataclass(frozen=True)
class Settings:
    """Collect documented functions."""

    packages: tuple[str, ...]
    """Installed packages; `stdlib` is the standard library."""
    out: Path
    """Prompt file to write."""
    shortest: int = 120
    """Fewest characters of a function."""
    longest: int = 600
    """Most characters of a function."""


def folder_of(package: str) -> Path:
    if package == STDLIB:
        return Path(sysconfig.get_paths()["stdlib"])
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(f"--packages: no package '{package}' is installed")
    return Path(spec.origin).parent


def functions(file: Path) -> Iterator[tuple[str, str]]:
    """(signature and docstring, rest) of each documented function of a file."""
    try:
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (UnicodeDecodeError, SyntaxError):  # files that are no Python source, or of another version
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            whole = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).splitlines()
            opening = (node.body[0].end_lineno or node.lineno) - node.lineno + 1
            yield "\n".join(whole[:opening]), "\n".join(whole[opening:])


def run(settings: Settings) -> None:
    prompts: list[str] = []
    seen: set[str] = set()
    for package in settings.packages:
        folder = folder_of(package)
        for file in sorted(folder.rglob("*.py")):
            if _SKIPPED & set(file.relative_to(folder).parts):
                continue
            for opening, rest in functions(file):
                if rest and settings.shortest <= len(opening + rest) <= settings.longest and rest not in seen:
                    seen.add(rest)
                    name = f"{package}/{len(prompts)}"
                    prompts.append(json.dumps({"id": name, "turns": [opening], "answer": rest}))
    if not prompts:
        raise UserError(f"{settings.out}: no function of {settings.shortest} to {settings.longest} characters found")
    with reported_as_user_error(f"{settings.out}: cannot be written", OSError):
        write_text(settings.out, "".join(f"{line}\n" for line in prompts))
    print(f"{settings.out}: {len(prompts)} functions")


if __name__ == "__main__":
    run_command(lambda: run(tyro.cli(Settings, description=__doc__)))
