"""What every drafter gives the decoding step."""

from typing import Protocol

from jaxtyping import Array, Float, Int

from ecospec_jax.cache import KVCache, Rows


class Drafter(Protocol):
    """A drafter (`models/eagle3.py` is the model to follow). Its states are opaque to the caller."""

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Which boundaries of the target it wants as features; see `TargetOutput`."""
        ...

    @property
    def proposable(self) -> int:
        """How many different tokens it can propose: the most children a node can have."""
        ...

    @property
    def vocabulary(self) -> Int[Array, " proposable"]:
        """Target ids of the tokens it can propose."""
        ...

    def empty_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache of `capacity` slots a sequence."""
        ...

    def catch_up(
        self, rows: Rows, features_BRF: Float[Array, "batch rows features"], cache: KVCache
    ) -> tuple[Float[Array, "batch rows state"], KVCache]:
        """Processes committed tokens with the target's features of the position before each."""
        ...

    def extend(
        self, rows: Rows, state_BRH: Float[Array, "batch rows state"], cache: KVCache
    ) -> tuple[Float[Array, "batch rows state"], KVCache]:
        """Processes drafted tokens with their parents' states."""
        ...

    def logits(self, state: Float[Array, "... state"]) -> Float[Array, "... proposable"]:
        """Logits of the next token over `vocabulary`, float32."""
        ...

    def propose(self, state: Float[Array, "... state"], k: int) -> tuple[Int[Array, "... k"], Float[Array, "... k"]]:
        """The k likeliest next tokens (target ids) and their log-probabilities."""
        ...
