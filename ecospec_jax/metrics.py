"""What is counted while decoding: sums on the device, figures on the host."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from ecospec_jax import expert_bits


@jax.tree_util.register_dataclass
@dataclass
class ExpertUse:
    """Experts of one verification, over its live rows.

    Attributes:
        distinct_L: distinct experts each MoE layer really touched, over the whole batch.
        predicted_L: the same of the predicted sets.
        hits_L: true experts that were predicted for the very row that used them.
        uses: experts used, row by row and layer by layer.
        added_error: (layer, expert) pairs that the candidate nodes added to the root's: sum over sequences and layers
            of |predicted - true|, the error of what the policy takes for the cost.
    """

    distinct_L: Int[Array, " layers"]
    predicted_L: Int[Array, " layers"]
    hits_L: Int[Array, " layers"]
    uses: Int[Array, ""]
    added_error: Int[Array, ""]


def expert_use(
    true_BRLW: UInt32[Array, "batch rows layers words"],
    predicted_BRLW: UInt32[Array, "batch rows layers words"],
    live_BR: Bool[Array, "batch rows"],
) -> ExpertUse:
    """Compares true and predicted experts; row 0 is the root. Without a predictor pass empty sets."""
    live = live_BR[..., None, None]
    true_BRLW = jnp.where(live, true_BRLW, jnp.uint32(0))
    predicted_BRLW = jnp.where(live, predicted_BRLW, jnp.uint32(0))

    def added_BL(sets_BRLW: UInt32[Array, "batch rows layers words"]) -> Int[Array, "batch layers"]:
        return expert_bits.count(expert_bits.union(sets_BRLW, axis=1) & ~sets_BRLW[:, 0])

    return ExpertUse(
        distinct_L=expert_bits.count(expert_bits.union(true_BRLW, axis=(0, 1))),
        predicted_L=expert_bits.count(expert_bits.union(predicted_BRLW, axis=(0, 1))),
        hits_L=jnp.sum(expert_bits.count(true_BRLW & predicted_BRLW), axis=(0, 1)),
        uses=jnp.sum(expert_bits.count(true_BRLW)),
        added_error=jnp.sum(jnp.abs(added_BL(predicted_BRLW) - added_BL(true_BRLW))),
    )


@jax.tree_util.register_dataclass
@dataclass
class Counters:
    """Sums over the verifications of one batch, kept on the device.

    Attributes:
        verifications: target passes with at least one live sequence.
        emitted_BP: `[b, j]`: verifications of sequence b that emitted j + 1 tokens (cut ones with what was left).
        use: experts, true and predicted.
        live_rows: rows that were verified.
    """

    verifications: Int[Array, ""]
    emitted_BP: Int[Array, "batch path"]
    use: ExpertUse
    live_rows: Int[Array, ""]

    @staticmethod
    def zeros(batch: int, longest: int, moe_layers: int) -> "Counters":
        """Nothing counted yet."""
        zero, zero_L = jnp.zeros((), jnp.int32), jnp.zeros(moe_layers, jnp.int32)
        return Counters(
            zero, jnp.zeros((batch, longest), jnp.int32), ExpertUse(zero_L, zero_L, zero_L, zero, zero), zero
        )

    def add(self, emitted_B: Int[Array, " batch"], use: ExpertUse, live_BR: Bool[Array, "batch rows"]) -> "Counters":
        """Counts one verification; `emitted_B` is 0 for sequences that were finished before."""
        longest = self.emitted_BP.shape[1]
        return Counters(
            verifications=self.verifications + jnp.any(live_BR),
            emitted_BP=self.emitted_BP + (emitted_B[:, None] == 1 + jnp.arange(longest)),
            use=jax.tree.map(jnp.add, self.use, use),
            live_rows=self.live_rows + jnp.sum(live_BR, dtype=jnp.int32),
        )


@dataclass(frozen=True)
class DecodeStats:
    """Sums over decoded batches and the figures made of them. Prefill and the token it gives are kept apart.

    Attributes:
        prefill_seconds, decode_seconds: wall time, the device's work included.
        verifications: target passes.
        emitted_histograms: one row a sequence: `[j]` verifications that emitted j + 1 tokens.
        distinct_by_layer: distinct experts of each MoE layer, summed over verifications.
        predicted_by_layer: distinct predicted experts likewise; zeros without a predictor.
        hits_by_layer: true experts that were predicted for the row that used them.
        uses, added_error: see `ExpertUse`.
        live_rows: rows that were verified.
        draft_experts: distinct experts of its own that the drafter read, pass by pass, summed; 0 if it has none.
    """

    prefill_seconds: float
    decode_seconds: float
    verifications: int
    emitted_histograms: tuple[tuple[int, ...], ...]
    distinct_by_layer: tuple[int, ...]
    predicted_by_layer: tuple[int, ...]
    hits_by_layer: tuple[int, ...]
    uses: int
    added_error: int
    live_rows: int
    draft_experts: int = 0

    @staticmethod
    def create(
        counters: Counters,
        sequences: int,
        prefill_seconds: float,
        decode_seconds: float,
        draft_experts: Int[Array, ""] | None = None,
    ) -> "DecodeStats":
        """From device counters; only the first `sequences` of the batch are real."""
        host = jax.device_get(counters)
        return DecodeStats(
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            verifications=int(host.verifications),
            emitted_histograms=tuple(tuple(int(n) for n in row) for row in host.emitted_BP[:sequences]),
            distinct_by_layer=tuple(int(n) for n in host.use.distinct_L),
            predicted_by_layer=tuple(int(n) for n in host.use.predicted_L),
            hits_by_layer=tuple(int(n) for n in host.use.hits_L),
            uses=int(host.use.uses),
            added_error=int(host.use.added_error),
            live_rows=int(host.live_rows),
            draft_experts=0 if draft_experts is None else int(draft_experts),
        )

    def __add__(self, other: "DecodeStats") -> "DecodeStats":
        """Figures of both together; the histograms keep a row for every sequence of each."""

        def both(mine: tuple[int, ...], theirs: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(a + b for a, b in zip(mine, theirs, strict=True))

        return DecodeStats(
            prefill_seconds=self.prefill_seconds + other.prefill_seconds,
            decode_seconds=self.decode_seconds + other.decode_seconds,
            verifications=self.verifications + other.verifications,
            emitted_histograms=self.emitted_histograms + other.emitted_histograms,
            distinct_by_layer=both(self.distinct_by_layer, other.distinct_by_layer),
            predicted_by_layer=both(self.predicted_by_layer, other.predicted_by_layer),
            hits_by_layer=both(self.hits_by_layer, other.hits_by_layer),
            uses=self.uses + other.uses,
            added_error=self.added_error + other.added_error,
            live_rows=self.live_rows + other.live_rows,
            draft_experts=self.draft_experts + other.draft_experts,
        )

    @property
    def emitted(self) -> int:
        """Tokens that decoding emitted, all sequences together."""
        return sum((j + 1) * n for row in self.emitted_histograms for j, n in enumerate(row))

    @property
    def tau(self) -> float:
        """Acceptance length: tokens per verification of a sequence, bonus included; nan when there was none."""
        return self.emitted / self.passes if self.passes else float("nan")

    @property
    def passes(self) -> int:
        """Verifications of single sequences: one target pass over a batch of n counts n times."""
        return sum(n for row in self.emitted_histograms for n in row)

    @property
    def u(self) -> float:
        """U: mean over MoE layers of the distinct experts a verification touches; nan when there was none."""
        return self._per_verification(self.distinct_by_layer)

    @property
    def predicted_u(self) -> float:
        """U as the predictor saw it; nan without a predictor."""
        return self._per_verification(self.predicted_by_layer) if any(self.predicted_by_layer) else float("nan")

    @property
    def overlap(self) -> float:
        """Share of the true experts of verified rows that were predicted for that row; nan without a predictor."""
        return sum(self.hits_by_layer) / self.uses if any(self.predicted_by_layer) else float("nan")

    @property
    def marginal_error(self) -> float:
        """Mean error of the predicted number of experts that a sequence adds in a layer; nan without a predictor."""
        if not any(self.predicted_by_layer):
            return float("nan")
        return self.added_error / (self.passes * len(self.distinct_by_layer))

    def _per_verification(self, by_layer: tuple[int, ...]) -> float:
        return float(np.mean(by_layer)) / self.verifications if self.verifications and by_layer else float("nan")

    @property
    def rows(self) -> float:
        """Mean live rows per verification; nan when there was none."""
        return self.live_rows / self.verifications if self.verifications else float("nan")

    @property
    def draft_u(self) -> float:
        """Distinct experts of its own that the drafter reads per verification, all its passes; nan if it has none."""
        return self.draft_experts / self.verifications if self.draft_experts else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """Decoding throughput; nan when nothing was decoded."""
        return self.emitted / self.decode_seconds if self.emitted else float("nan")
