"""Layers that every model shares: linear, RMSNorm, attention over a cache, dense MLP.

Weights keep the checkpoint's layout (contraction dimension last). Each parameter carries `logical_axes`, one name per
dimension; `sharding.py` alone maps these to mesh axes.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ecospec_jax.cache import Buffer, write_rows
from ecospec_jax.kernels import Plain, dense
from ecospec_jax.models.rope import rotate


def parameter(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], dtype: jnp.dtype, scale: float | None = None
) -> nnx.Param:
    """A normally distributed parameter (standard deviation `scale`, default 1/sqrt of the last dimension)."""
    assert len(shape) == len(axes)
    deviation = shape[-1] ** -0.5 if scale is None else scale
    value = deviation * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(value.astype(dtype), logical_axes=axes)


def project(x: Float[Array, "... inputs"], weight_OI: Float[Array, "outputs inputs"]) -> Float[Array, "... outputs"]:
    """Product x W^T over the last dimension."""
    y_TO = dense(x.reshape(-1, x.shape[-1]), Plain(weight_OI))
    return y_TO.reshape(*x.shape[:-1], -1)


class Linear(nnx.Module):
    """y = x W^T (+ b), with W `[out, in]`."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        axes: tuple[str, str],
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        bias: bool = False,
    ) -> None:
        """`axes` are the logical names of (outputs, inputs)."""
        self.weight = parameter(rngs, (outputs, inputs), axes, dtype)
        self.bias = parameter(rngs, (outputs,), axes[:1], dtype, scale=0.02) if bias else None

    def __call__(self, x: Float[Array, "... inputs"]) -> Float[Array, "... outputs"]:
        """Applies the map to the last dimension."""
        y = project(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """Normalise in float32, cast to the input's dtype, then multiply by the weight (Qwen, Llama and DeepSeek order)."""

    def __init__(self, size: int, eps: float, *, dtype: jnp.dtype, axis: str = "embed") -> None:
        """`axis` is the logical name of the channel dimension."""
        self.weight = nnx.Param(jnp.ones((size,), dtype), logical_axes=(axis,))
        self.eps = eps

    def __call__(self, x: Float[Array, "... channels"]) -> Float[Array, "... channels"]:
        """Normalises the last dimension."""
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * self.weight[...]


class Embedding(nnx.Module):
    """Token embedding `[vocab, hidden]`, also usable as a tied head."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """Rows are token ids."""
        self.weight = parameter(rngs, (vocab_size, hidden_size), ("vocab", "embed"), dtype, scale=1.0)

    def __call__(self, tokens: Int[Array, "..."]) -> Float[Array, "... hidden"]:
        """Looks up token ids."""
        # Without the barrier XLA on CPU converts the whole table from bf16 before the decoding loop.
        weight, tokens = lax.optimization_barrier((self.weight[...], tokens))
        return jnp.take(weight, tokens, axis=0)

    def logits(self, hidden: Float[Array, "... hidden"]) -> Float[Array, "... vocab"]:
        """The transposed map: the weight as a head."""
        return project(hidden, self.weight[...])


class Attention(nnx.Module):
    """Grouped-query attention over a cache; optional per-head q/k RMSNorm before rope, optional biases."""

    def __init__(
        self,
        *,
        input_size: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        qk_norm_eps: float | None = None,
        bias: bool = False,
    ) -> None:
        """`input_size` differs from `hidden_size` where embedding and hidden state are concatenated (EAGLE-3)."""
        heads, kv_heads = num_heads * head_dim, num_kv_heads * head_dim
        self.q = Linear(input_size, heads, ("heads", "embed"), dtype=dtype, rngs=rngs, bias=bias)
        self.k = Linear(input_size, kv_heads, ("kv_heads", "embed"), dtype=dtype, rngs=rngs, bias=bias)
        self.v = Linear(input_size, kv_heads, ("kv_heads", "embed"), dtype=dtype, rngs=rngs, bias=bias)
        self.o = Linear(heads, hidden_size, ("embed", "heads"), dtype=dtype, rngs=rngs, bias=bias)
        normed = qk_norm_eps is not None
        self.q_norm = RMSNorm(head_dim, qk_norm_eps, dtype=dtype, axis="head_dim") if normed else None
        self.k_norm = RMSNorm(head_dim, qk_norm_eps, dtype=dtype, axis="head_dim") if normed else None
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim

    def __call__(
        self,
        x_BRD: Float[Array, "batch rows inputs"],
        cos_sin: tuple[Array, Array],
        buffers: tuple[Buffer, Buffer],
        start_B: Int[Array, " batch"],
        visible_BRS: Bool[Array, "batch rows slots"],
    ) -> tuple[Float[Array, "batch rows hidden"], tuple[Buffer, Buffer]]:
        """Writes the rows' keys and values at `start_B`, then attends to the visible slots. Returns output, buffers."""

        def split(y: Array, heads: int) -> Array:
            return y.reshape(*y.shape[:2], heads, self.head_dim).swapaxes(1, 2)

        q, k, v = (
            split(self.q(x_BRD), self.num_heads),
            split(self.k(x_BRD), self.num_kv_heads),
            split(self.v(x_BRD), self.num_kv_heads),
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *cos_sin), rotate(k, *cos_sin)
        keys, values = write_rows(buffers[0], k, start_B), write_rows(buffers[1], v, start_B)

        batch, _, rows, _ = q.shape
        groups = self.num_heads // self.num_kv_heads
        q_BKGRH = q.reshape(batch, self.num_kv_heads, groups, rows, self.head_dim)
        # The rows are cast to the buffers' dtype, never a whole buffer to the rows'.
        scores = jnp.einsum("bkgrh,bksh->bkgrs", q_BKGRH.astype(keys.dtype), keys).astype(jnp.float32)
        scores = jnp.where(visible_BRS[:, None, None], scores * self.head_dim**-0.5, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
        mixed = jnp.einsum("bkgrs,bksh->brkgh", weights, values).astype(q.dtype)
        return self.o(mixed.reshape(batch, rows, self.num_heads * self.head_dim)), (keys, values)


class DenseMLP(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """Three bias-free maps."""
        self.gate = Linear(hidden_size, intermediate_size, ("mlp", "embed"), dtype=dtype, rngs=rngs)
        self.up = Linear(hidden_size, intermediate_size, ("mlp", "embed"), dtype=dtype, rngs=rngs)
        self.down = Linear(intermediate_size, hidden_size, ("embed", "mlp"), dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "... hidden"]) -> Float[Array, "... hidden"]:
        """Applies the MLP to the last dimension."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
