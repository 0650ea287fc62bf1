"""The experts of one layer, or of all layers with the index of one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ecospec_jax.kernels.formats import Matrix, check_matrix


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertWeights:
    """Weights of all experts, in the checkpoint's layout (contraction dimension last) and storage format.

    Attributes:
        gate_up: `(gate, up)`, each `[E, F, D]`, or one `[E, 2F, D]` whose even rows are gate and odd rows up.
        down: `[E, D, F]`.
        gate_up_bias: like `gate_up` without its last dimension, or None.
        down_bias: `[E, D]`, or None. It is inside the multiplication by the combine weight.
        layer: None, or a scalar; every array then has a further first dimension over layers, of which this is one.
    """

    gate_up: tuple[Matrix, Matrix] | Matrix
    down: Matrix
    gate_up_bias: tuple[Float[Array, "..."], Float[Array, "..."]] | Float[Array, "..."] | None = None
    down_bias: Float[Array, "..."] | None = None
    layer: Int[Array, ""] | None = None

    @property
    def split(self) -> bool:
        """Whether gate and up are two matrices; else their rows alternate in one."""
        return isinstance(self.gate_up, tuple)

    @property
    def gate_up_parts(self) -> tuple[tuple[Matrix, Float[Array, "..."] | None], ...]:
        """(matrix, bias) of gate and of up, or of the one matrix that holds both."""
        if isinstance(self.gate_up, tuple):
            biases = self.gate_up_bias if isinstance(self.gate_up_bias, tuple) else (None, None)
            return tuple(zip(self.gate_up, biases, strict=True))
        assert not isinstance(self.gate_up_bias, tuple)
        return ((self.gate_up, self.gate_up_bias),)

    @staticmethod
    def gate_and_up(rows: Sequence[Float[Array, "..."]]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """Gate and up from the products of `gate_up_parts`, whose last dimension is the parts' rows."""
        if len(rows) == 2:
            return rows[0], rows[1]
        return rows[0][..., 0::2], rows[0][..., 1::2]

    @property
    def count(self) -> int:
        """Number of experts of a layer."""
        return self.down.shape[-3]

    @property
    def hidden(self) -> int:
        """D."""
        return self.down.shape[-2]

    @property
    def ffn(self) -> int:
        """F."""
        return self.down.shape[-1]

    @property
    def storage(self) -> str:
        """Format of all matrices: `float32`, `bfloat16`, `mxfp4` or `fp8`."""
        return self.down.storage

    def check(self, hidden: int) -> None:
        """Raises ValueError naming the first array that does not fit rows of width `hidden`, or the others."""
        if self.layer is not None:
            shape, dtype = jnp.shape(self.layer), jnp.result_type(self.layer)
            if shape or not jnp.issubdtype(dtype, jnp.integer):
                raise ValueError(f"layer: {dtype}{list(shape)}, expected one whole number")
        stacked = () if self.layer is None else (self.down.shape[0],)
        if isinstance(self.gate_up, tuple):
            matrices = {"gate": (self.gate_up[0], self.ffn), "up": (self.gate_up[1], self.ffn)}
        else:
            matrices = {"gate_up": (self.gate_up, 2 * self.ffn)}
        matrices = {name: (matrix, (*stacked, self.count, rows, hidden)) for name, (matrix, rows) in matrices.items()}
        matrices["down"] = (self.down, (*stacked, self.count, hidden, self.ffn))
        for name, (matrix, _) in matrices.items():
            check_matrix(matrix, name)
        for name, (matrix, shape) in matrices.items():
            if matrix.shape != shape:
                raise ValueError(f"{name}: {list(matrix.shape)}, expected {list(shape)}")
            if matrix.storage != self.storage:
                raise ValueError(f"{name} is stored as {matrix.storage}, down as {self.storage}")
        biases = self.gate_up_bias if isinstance(self.gate_up_bias, tuple) else (self.gate_up_bias,)
        rows = self.ffn if self.split else 2 * self.ffn
        if self.gate_up_bias is not None and isinstance(self.gate_up_bias, tuple) != self.split:
            raise ValueError("gate_up_bias: one array for each array of gate_up is expected")
        for name, bias, size in (
            *(("gate_up_bias", bias, rows) for bias in biases),
            ("down_bias", self.down_bias, hidden),
        ):
            shape = (*stacked, self.count, size)
            if bias is not None and (bias.shape != shape or str(bias.dtype) not in ("float32", "bfloat16")):
                raise ValueError(f"{name}: {bias.dtype}{list(bias.shape)}, expected float32 or bfloat16{list(shape)}")

    def flat(self) -> tuple["ExpertWeights", Int[Array, ""] | int]:
        """All layers' experts as one list, without copying, and where the layer's own begin in it."""
        if self.layer is None:
            return self, 0
        merged = jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), replace(self, layer=None))
        return merged, self.layer * self.count
