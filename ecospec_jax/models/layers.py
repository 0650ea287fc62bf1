"""Layers that models share: linear, RMSNorm, attention over a cache, dense MLP. Weights are `[out, in]`."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from ecospec_jax.cache import BUFFER_AXES, Buffer, BufferShapes, RingSlots, Slots
from ecospec_jax.config import Eagle3Config, GptOssConfig, Qwen3MoeConfig
from ecospec_jax.kernels import Fp8, Matrix, Plain, dense
from ecospec_jax.models.matrices import MATRICES, Fp8Matrix, Mxfp4Matrix, Storage, parameter
from ecospec_jax.models.rope import rotate
from ecospec_jax.predictor_config import BackboneConfig
from ecospec_jax.sharding import Placed


def project(x: Float[Array, "... inputs"], matrix_OI: Matrix) -> Float[Array, "... outputs"]:
    """Product x W^T over the last dimension."""
    y_TO = dense(x.reshape(-1, x.shape[-1]), matrix_OI)
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
        storage: Storage = "plain",
    ) -> None:
        """`axes` are the logical names of (outputs, inputs). `storage` is `plain` or `fp8`."""
        matrix = MATRICES[storage]((outputs, inputs), axes, dtype=dtype, rngs=rngs)
        assert not isinstance(matrix, Mxfp4Matrix)
        self.weight = matrix.weight
        self.scales = matrix.scales if isinstance(matrix, Fp8Matrix) else None
        self.bias = parameter(rngs, (outputs,), axes[:1], dtype, scale=0.02) if bias else None

    @property
    def matrix(self) -> Plain | Fp8:
        """W as kernels take it."""
        return Plain(self.weight[...]) if self.scales is None else Fp8(self.weight[...], self.scales[...])

    def __call__(self, x: Float[Array, "... inputs"]) -> Float[Array, "... outputs"]:
        """Applies the map to the last dimension."""
        y = project(x, self.matrix)
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """Normalises in float32, then casts to the input's dtype and multiplies by the weight (Qwen, Llama, DeepSeek).

    gpt-oss multiplies in float32 before the cast (docs/formats.md A.0).
    """

    def __init__(
        self, size: int, eps: float, *, dtype: jnp.dtype, axis: str = "embed", scale_in_float32: bool = False
    ) -> None:
        """`axis` is the logical name of the channel dimension."""
        self.weight = nnx.Param(jnp.ones((size,), dtype), logical_axes=(axis,))
        self.eps, self.scale_in_float32 = eps, scale_in_float32

    def __call__(self, x: Float[Array, "... channels"]) -> Float[Array, "... channels"]:
        """Normalises the last dimension."""
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        if self.scale_in_float32:
            return (normed * self.weight[...].astype(jnp.float32)).astype(x.dtype)
        return normed.astype(x.dtype) * self.weight[...]


class Embedding(Placed):
    """Token embedding `[vocab, hidden]`, also usable as a tied head."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """Rows are token ids.

        Layouts split its channels: of a table split by tokens, XLA would gather all to look a single one up.
        """
        self.weight = parameter(rngs, (vocab_size, hidden_size), ("tokens", "channels"), dtype, scale=1.0)

    def __call__(self, tokens: Int[Array, "..."]) -> Float[Array, "... hidden"]:
        """Looks up token ids."""
        # Without the barrier XLA on CPU converts the whole table from bf16 before the decoding loop.
        weight, tokens = lax.optimization_barrier((self.weight[...], tokens))
        return self.whole(jnp.take(weight, tokens, axis=0))

    def logits(self, hidden: Float[Array, "... hidden"]) -> Float[Array, "... vocab"]:
        """The transposed map: the weight as a head."""
        return project(hidden, Plain(self.weight[...]))


class CachedAttention(Placed):
    """Attention over buffers that stay where the layout has them, whatever is computed from them."""

    def store(
        self, slots: Slots | RingSlots, buffer: Buffer, rows: Float[Array, "batch kv_heads rows channels"]
    ) -> tuple[Buffer, Float[Array, "batch kv_heads slots channels"]]:
        """`slots.store`."""
        kept, seen = slots.store(buffer, self.pin(rows, BUFFER_AXES))
        return self.pin(kept, BUFFER_AXES), self.pin(seen, BUFFER_AXES)


class Attention(CachedAttention):
    """Grouped-query attention over a cache; optional per-head q/k RMSNorm before rope, biases, sinks.

    A sink is a logit of each head that takes part in the softmax and has no value: attention may go nowhere.
    """

    def __init__(
        self,
        config: Qwen3MoeConfig | GptOssConfig | Eagle3Config | BackboneConfig,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        input_size: int | None = None,
        qk_norm_eps: float | None = None,
        bias: bool = False,
        output_bias: bool = False,
        sinks: bool = False,
    ) -> None:
        """`input_size` differs from the hidden size where embedding and hidden state are concatenated (EAGLE-3).

        `bias` is of q, k and v, `output_bias` of the output.
        """
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        heads, kv_heads = num_heads * head_dim, num_kv_heads * head_dim
        inputs = config.hidden_size if input_size is None else input_size
        linear = partial(Linear, dtype=dtype, rngs=rngs)
        self.q = linear(inputs, heads, ("heads", "embed"), bias=bias)
        self.k = linear(inputs, kv_heads, ("kv_heads", "embed"), bias=bias)
        self.v = linear(inputs, kv_heads, ("kv_heads", "embed"), bias=bias)
        self.o = linear(heads, config.hidden_size, ("embed", "heads"), bias=output_bias)
        normed = qk_norm_eps is not None
        self.q_norm = RMSNorm(head_dim, qk_norm_eps, dtype=dtype, axis="head_dim") if normed else None
        self.k_norm = RMSNorm(head_dim, qk_norm_eps, dtype=dtype, axis="head_dim") if normed else None
        self.sinks = parameter(rngs, (num_heads,), ("heads",), dtype, scale=1.0) if sinks else None
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim

    @property
    def cached(self) -> BufferShapes:
        """(heads, channels) of keys and of values."""
        shape = self.num_kv_heads, self.head_dim
        return shape, shape

    def __call__(
        self,
        x_BRD: Float[Array, "batch rows inputs"],
        cos_sin: tuple[Array, Array],
        buffers: tuple[Buffer, Buffer],
        slots: Slots | RingSlots,
    ) -> tuple[Float[Array, "batch rows hidden"], tuple[Buffer, Buffer]]:
        """Stores the rows' keys and values, then attends to the visible slots. Returns output, buffers."""

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
        (kept_keys, keys), (kept_values, values) = (
            self.store(slots, buffers[0], k),
            self.store(slots, buffers[1], v),
        )

        batch, _, rows, _ = q.shape
        groups = self.num_heads // self.num_kv_heads
        q_BKGRH = q.reshape(batch, self.num_kv_heads, groups, rows, self.head_dim)
        # The rows are cast to the buffers' dtype, never a whole buffer to the rows'.
        scores = jnp.einsum("bkgrh,bksh->bkgrs", q_BKGRH.astype(keys.dtype), keys).astype(jnp.float32)
        scores = jnp.where(slots.visible_BRS[:, None, None], scores * self.head_dim**-0.5, -jnp.inf)
        weights = self._softmax(scores).astype(values.dtype)
        mixed = jnp.einsum("bkgrs,bksh->brkgh", weights, values).astype(q.dtype)
        return self.o(mixed.reshape(batch, rows, self.num_heads * self.head_dim)), (kept_keys, kept_values)

    def _softmax(
        self, scores: Float[Array, "batch kv_heads groups rows slots"]
    ) -> Float[Array, "batch kv_heads groups rows slots"]:
        if self.sinks is None:
            return jax.nn.softmax(scores, axis=-1)
        sinks = self.sinks[...].astype(jnp.float32).reshape(scores.shape[1], scores.shape[2], 1, 1)
        sinks = jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))
        return jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1), axis=-1)[..., :-1]


class DenseMLP(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        storage: Storage = "plain",
    ) -> None:
        """Three bias-free maps."""
        linear = partial(Linear, dtype=dtype, rngs=rngs, storage=storage)
        self.gate = linear(hidden_size, intermediate_size, ("mlp", "embed"))
        self.up = linear(hidden_size, intermediate_size, ("mlp", "embed"))
        self.down = linear(intermediate_size, hidden_size, ("embed", "mlp"))

    def __call__(self, x: Float[Array, "... hidden"]) -> Float[Array, "... hidden"]:
        """Applies the MLP to the last dimension."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
