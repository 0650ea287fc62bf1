"""What a command says about bad input."""

from collections.abc import Callable

import pytest

from ecospec_jax.errors import run_command


def complaint(run: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command prints about bad input, with exit code 2."""
    with pytest.raises(SystemExit) as caught:
        run_command(run)
    lines = capsys.readouterr().err.strip().splitlines()
    assert caught.value.code == 2 and len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0].removeprefix("error: ")
