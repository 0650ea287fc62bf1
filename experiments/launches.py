"""How many kernels a compiled step starts, counted in XLA's text of it."""

import re
from collections.abc import Mapping

# These start nothing: they name, place or view values.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "partition-id"}
ENTERED = {"while", "conditional", "call"}  # their computations run as instructions of their own; a fusion's do not
_BEGINNING = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (?:\([^=]*\)|\S+) ([\w\-]+)\(")
_ENTERS = re.compile(
    r"(?:body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}"
)


def count_launches(text: str) -> int:
    """Instructions of the program that do something: a fusion, a library call, a custom call or a copy each.

    Bodies of loops and all branches of conditionals count once, whatever the number of turns.
    """
    computations, entry = _computations(text)
    return _count(computations, entry)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    found: dict[str, list[str]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if beginning := _BEGINNING.match(line):
            current = found.setdefault(beginning[2], [])
            entry = beginning[2] if beginning[1] else entry
        elif current is not None and _INSTRUCTION.match(line):
            current.append(line)
    return found, entry


def _count(computations: Mapping[str, list[str]], name: str) -> int:
    total = 0
    for line in computations[name]:
        matched = _INSTRUCTION.match(line)
        assert matched is not None
        if matched[1] in ENTERED:
            for one, several in _ENTERS.findall(line):
                names = [one] if one else [part.strip().lstrip("%") for part in several.split(",")]
                total += sum(_count(computations, each) for each in names)
        elif matched[1] not in FREE:
            total += 1
    return total
