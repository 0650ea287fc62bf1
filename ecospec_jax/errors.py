"""The one error a user can cause, and how every command reports it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

EXIT_BAD_INPUT = 2


class UserError(Exception):
    """Bad input: a file, tensor, option or prompt that cannot be used.

    The message is one line that names what is wrong and where (file, tensor, line or option). Commands print it and
    exit with code 2; from Python it is an ordinary exception.
    """


@contextmanager
def reported_as_user_error(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turns exceptions of the given kinds into a `UserError` that begins with `what`."""
    try:
        yield
    except kinds as error:
        reason = str(error).strip().splitlines()
        raise UserError(f"{what}: {reason[0] if reason else type(error).__name__}") from error


def run_command(main: Callable[[], None]) -> NoReturn:
    """Runs a command-line entry point; a `UserError` becomes one line on stderr and exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)
