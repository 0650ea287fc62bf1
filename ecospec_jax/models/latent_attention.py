"""Multi-head latent attention (docs/formats.md A.3): keys and values of all heads come from one small latent a token.

The cache holds the normed latent (as keys) and the rotated key that all heads share (as values). Few rows are attended
to in the space of the latent ("absorbed"): the maps from it to a head's keys and values move to the query's and the
output's side, so nothing is expanded for the tokens in the cache. Many rows (prefill) are cheaper the other way round.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ecospec_jax.cache import Buffer, BufferShapes, RingSlots, Slots
from ecospec_jax.config import DeepseekV3Config
from ecospec_jax.models.layers import CachedAttention, Linear, RMSNorm
from ecospec_jax.models.rope import rotate_pairs, score_factor

NORM_EPS = 1e-6  # of the latent norms, whatever the config says
MOST_ABSORBED = 64  # rows; beyond, keys and values are expanded


class LatentAttention(CachedAttention):
    """The attention of DeepSeek-V3. Its rope turns channel 2j with channel 2j + 1."""

    def __init__(self, config: DeepseekV3Config, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        """Projections are stored as `config.storage` says."""
        self.heads, self.latent = config.num_heads, config.kv_lora_rank
        self.plain, self.rotary, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.most_absorbed = MOST_ABSORBED
        self.scale = (self.plain + self.rotary) ** -0.5 * score_factor(config.rope)
        linear = partial(Linear, dtype=dtype, rngs=rngs, storage=config.storage)
        self.q_a = linear(config.hidden_size, config.q_lora_rank, ("latent", "embed"))
        self.q_a_norm = RMSNorm(config.q_lora_rank, NORM_EPS, dtype=dtype, axis="latent")
        self.q_b = linear(config.q_lora_rank, self.heads * (self.plain + self.rotary), ("heads", "latent"))
        self.kv_a = linear(config.hidden_size, self.latent + self.rotary, ("latent", "embed"))
        self.kv_a_norm = RMSNorm(self.latent, NORM_EPS, dtype=dtype, axis="latent")
        self.kv_b = linear(self.latent, self.heads * (self.plain + self.value), ("heads", "latent"))
        self.o = linear(self.heads * self.value, config.hidden_size, ("embed", "heads"))

    @property
    def cached(self) -> BufferShapes:
        """(heads, channels) of the latent and of the shared key."""
        return (1, self.latent), (1, self.rotary)

    def __call__(
        self,
        x_BRD: Float[Array, "batch rows hidden"],
        cos_sin: tuple[Array, Array],
        buffers: tuple[Buffer, Buffer],
        slots: Slots | RingSlots,
    ) -> tuple[Float[Array, "batch rows hidden"], tuple[Buffer, Buffer]]:
        """Stores the rows' latents and shared keys, then attends to the visible slots. Returns output, buffers."""
        batch, rows, _ = x_BRD.shape
        q_BRNH = self.q_b(self.q_a_norm(self.q_a(x_BRD))).reshape(batch, rows, self.heads, -1)
        q_BNRP, q_BNRO = jnp.split(q_BRNH.swapaxes(1, 2), [self.plain], axis=-1)
        latent_BRC, key_BRO = jnp.split(self.kv_a(x_BRD), [self.latent], axis=-1)
        key_B1RO = rotate_pairs(key_BRO[:, None], *cos_sin)
        kept_latents, latents = self.store(slots, buffers[0], self.kv_a_norm(latent_BRC)[:, None])
        kept_keys, keys = self.store(slots, buffers[1], key_B1RO)
        # The rows are cast to the buffers' dtype, never a whole buffer to the rows'.
        turned_BNRO = rotate_pairs(q_BNRO, *cos_sin).astype(keys.dtype)
        scores_BNRS = jnp.einsum("bnro,bso->bnrs", turned_BNRO, keys[:, 0]).astype(jnp.float32)
        attend = self._absorbed if rows <= self.most_absorbed else self._expanded
        mixed_BRNV = attend(q_BNRP, scores_BNRS, latents[:, 0], slots)
        return self.o(mixed_BRNV.astype(x_BRD.dtype).reshape(batch, rows, -1)), (kept_latents, kept_keys)

    def _maps(self) -> tuple[Float[Array, "heads plain latent"], Float[Array, "heads value latent"]]:
        """From the latent to each head's keys and values."""
        both = self.kv_b.matrix.widen().reshape(self.heads, self.plain + self.value, self.latent)
        return both[:, : self.plain], both[:, self.plain :]

    def _weights(self, scores_BNRS: Float[Array, "batch heads rows slots"], slots: Slots | RingSlots) -> Array:
        visible = slots.visible_BRS[:, None]
        return jax.nn.softmax(jnp.where(visible, scores_BNRS * self.scale, -jnp.inf), axis=-1)

    def _absorbed(
        self, q_BNRP: Array, scores_BNRS: Array, latents_BSC: Array, slots: Slots | RingSlots
    ) -> Float[Array, "batch rows heads value"]:
        to_keys, to_values = (part.astype(q_BNRP.dtype) for part in self._maps())
        q_BNRC = jnp.einsum("bnrp,npc->bnrc", q_BNRP, to_keys).astype(latents_BSC.dtype)
        scores_BNRS = scores_BNRS + jnp.einsum("bnrc,bsc->bnrs", q_BNRC, latents_BSC).astype(jnp.float32)
        weights_BNRS = self._weights(scores_BNRS, slots).astype(latents_BSC.dtype)
        mixed_BNRC = jnp.einsum("bnrs,bsc->bnrc", weights_BNRS, latents_BSC).astype(q_BNRP.dtype)
        return jnp.einsum("bnrc,nvc->brnv", mixed_BNRC, to_values)

    def _expanded(
        self, q_BNRP: Array, scores_BNRS: Array, latents_BSC: Array, slots: Slots | RingSlots
    ) -> Float[Array, "batch rows heads value"]:
        to_keys, to_values = (part.astype(latents_BSC.dtype) for part in self._maps())
        keys_BNSP = jnp.einsum("bsc,npc->bnsp", latents_BSC, to_keys)
        values_BNSV = jnp.einsum("bsc,nvc->bnsv", latents_BSC, to_values)
        scores_BNRS = scores_BNRS + jnp.einsum("bnrp,bnsp->bnrs", q_BNRP.astype(latents_BSC.dtype), keys_BNSP).astype(
            jnp.float32
        )
        weights_BNRS = self._weights(scores_BNRS, slots).astype(latents_BSC.dtype)
        return jnp.einsum("bnrs,bnsv->brnv", weights_BNRS, values_BNSV)
