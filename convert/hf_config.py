"""Reads a Hugging Face `config.json`; every refusal names the file and the key.

Two spellings are in use: that of the files on the Hub, and that of transformers 5 (docs/formats.md A.0).
"""

import json
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from ecospec_jax.config import RopeConfig, from_json
from ecospec_jax.errors import UserError, reported_as_user_error

ValueT = TypeVar("ValueT", bool, int, float, str, list, dict)
ResultT = TypeVar("ResultT")
ParamsT = ParamSpec("ParamsT")

_YARN_OPTIONS = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")
_ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # rope type -> required keys, optional keys
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (("factor", "original_max_position_embeddings"), _YARN_OPTIONS),
}


class HFConfig:
    """A JSON object of a config file. A key that is null counts as absent, as it does for transformers."""

    def __init__(self, file: Path, values: Any, where: str = "") -> None:
        """`where` is the path of keys to this object within the file, such as `eagle_config.`."""
        self.file, self._where = file, where
        if not isinstance(values, dict):
            raise UserError(f"{file}: {where.rstrip('.') or 'the file'} is no JSON object")
        self.values: dict[str, Any] = values

    @classmethod
    def read(cls, file: Path) -> "HFConfig":
        """Reads a JSON file."""
        if not file.is_file():
            raise UserError(f"{file}: no such file")
        with reported_as_user_error(f"{file}: cannot be read", OSError, ValueError):
            return cls(file, json.loads(file.read_text()))

    def refuse(self, key: str, reason: str) -> NoReturn:
        """Raises a `UserError` about a key."""
        raise UserError(f"{self.file}: {self._where}{key}: {reason}")

    def find(self, kind: type[ValueT], *spellings: str) -> ValueT | None:
        """The value under any of the spellings; None if there is none."""
        found = {key: self.values[key] for key in spellings if self.values.get(key) is not None}
        for key, value in found.items():
            if type(value) is not kind and not (kind is float and type(value) is int):
                self.refuse(key, f"{value!r} is no {kind.__name__}")
            if value != next(iter(found.values())):
                self.refuse(key, f"{value!r} contradicts {next(iter(found))}")
        return next(iter(found.values()), None)

    def need(self, kind: type[ValueT], *spellings: str) -> ValueT:
        """The value under any of the spellings."""
        value = self.find(kind, *spellings)
        if value is None:
            self.refuse(" or ".join(spellings), "missing")
        return value

    def size(self, *spellings: str) -> int:
        """A positive integer."""
        value = self.need(int, *spellings)
        if value <= 0:
            self.refuse(spellings[0], f"{value} is not positive")
        return value

    def expect(self, key: str, value: Any) -> None:
        """Refuses any other value than the one this project implements, which is also the default of an absent key."""
        if self.values.get(key) not in (None, value):
            self.refuse(key, f"{self.values[key]!r} is not supported, only {value!r}")

    def integers(self, key: str) -> tuple[int, ...] | None:
        """A list of integers; None if there is none."""
        values = self.find(list, key)
        if values is not None and not all(type(value) is int for value in values):
            self.refuse(key, f"{values} are not all integers")
        return None if values is None else tuple(values)

    def section(self, *spellings: str) -> "HFConfig | None":
        """The nested object under any of the spellings; None if there is none."""
        values = self.find(dict, *spellings)
        if values is None:
            return None
        key = next(key for key in spellings if self.values.get(key) is not None)
        return HFConfig(self.file, values, f"{self._where}{key}.")

    def quantisation(self, method: str, keys: Set[str]) -> "HFConfig | None":
        """The `quantization_config`, None without one; its method must be this, and its other keys among `keys`."""
        section = self.section("quantization_config")
        if section is None:
            return None
        stated = section.need(str, "quant_method")
        if stated != method:
            section.refuse("quant_method", f"'{stated}' is not supported, only '{method}'")
        for key in section.values.keys() - {"quant_method", *keys}:
            section.refuse(key, f"not known for quant_method '{method}'")
        return section

    def build(self, make: Callable[ParamsT, ResultT], *args: ParamsT.args, **kwargs: ParamsT.kwargs) -> ResultT:
        """`make(...)`, whose refusal of a value then names the file."""
        with reported_as_user_error(str(self.file), UserError):
            return make(*args, **kwargs)

    def rope(self, default_theta: float | None = None) -> RopeConfig:
        """The rope in either spelling; without `default_theta` the config must state a theta."""
        scaling = self.section("rope_parameters", "rope_scaling") or HFConfig(self.file, {})
        kind = scaling.find(str, "rope_type", "type") or "default"
        if kind not in _ROPE_KEYS:
            scaling.refuse("rope_type", f"'{kind}' is not supported, only {', '.join(_ROPE_KEYS)}")
        thetas = {scaling.find(float, "rope_theta"), self.find(float, "rope_theta")} - {None} or {default_theta}
        if len(thetas) > 1:
            scaling.refuse("rope_theta", "contradicts the other rope_theta")
        required, optional = _ROPE_KEYS[kind]
        for key in scaling.values.keys() - {*required, *optional, "rope_type", "type", "rope_theta"}:
            scaling.refuse(key, f"not known for rope type '{kind}'")
        stated = {key: scaling.need(float, key) for key in required}
        stated |= {key: scaling.values[key] for key in optional if scaling.values.get(key) is not None}
        if "original_max_position_embeddings" in stated:
            stated["original_max_positions"] = stated.pop("original_max_position_embeddings")
        theta = thetas.pop()
        if theta is None:
            self.refuse("rope_theta", "missing")
        return self.build(from_json, RopeConfig, {"theta": theta, "kind": kind, **stated}, "rope")
