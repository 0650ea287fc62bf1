"""What is counted while decoding: sums on the device, figures on the host."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int


def distinct_experts(expert_ids_LBRK: Int[Array, "layers batch rows k"], experts: int) -> Int[Array, " layers"]:
    """Distinct experts each MoE layer touches over all rows; ids outside `0 .. experts-1` (dead rows) do not count."""
    layers = expert_ids_LBRK.shape[0]
    used_LE = jnp.zeros((layers, experts), bool)
    ids_LP = expert_ids_LBRK.reshape(layers, math.prod(expert_ids_LBRK.shape[1:]))
    used_LE = used_LE.at[jnp.arange(layers)[:, None], ids_LP].set(True, mode="drop")
    return jnp.sum(used_LE, axis=1, dtype=jnp.int32)


@jax.tree_util.register_dataclass
@dataclass
class Counters:
    """Sums over the verifications of one batch, kept on the device.

    Attributes:
        verifications: target passes with at least one live sequence.
        emitted_BP: `[b, j]`: verifications of sequence b that emitted j + 1 tokens (cut ones with what was left).
        distinct_L: distinct experts per MoE layer over the live rows of the whole batch.
        live_rows: rows that were verified.
    """

    verifications: Int[Array, ""]
    emitted_BP: Int[Array, "batch path"]
    distinct_L: Int[Array, " layers"]
    live_rows: Int[Array, ""]

    @staticmethod
    def zeros(batch: int, longest: int, moe_layers: int) -> "Counters":
        """Nothing counted yet."""
        zero = jnp.zeros((), jnp.int32)
        return Counters(zero, jnp.zeros((batch, longest), jnp.int32), jnp.zeros(moe_layers, jnp.int32), zero)

    def add(
        self, emitted_B: Int[Array, " batch"], distinct_L: Int[Array, " layers"], live_BR: Bool[Array, "batch rows"]
    ) -> "Counters":
        """Counts one verification; `emitted_B` is 0 for sequences that were finished before."""
        longest = self.emitted_BP.shape[1]
        return Counters(
            verifications=self.verifications + jnp.any(live_BR),
            emitted_BP=self.emitted_BP + (emitted_B[:, None] == 1 + jnp.arange(longest)),
            distinct_L=self.distinct_L + distinct_L,
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
        live_rows: rows that were verified.
    """

    prefill_seconds: float
    decode_seconds: float
    verifications: int
    emitted_histograms: tuple[tuple[int, ...], ...]
    distinct_by_layer: tuple[int, ...]
    live_rows: int

    @staticmethod
    def create(counters: Counters, sequences: int, prefill_seconds: float, decode_seconds: float) -> "DecodeStats":
        """From device counters; only the first `sequences` of the batch are real."""
        host = jax.device_get(counters)
        return DecodeStats(
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            verifications=int(host.verifications),
            emitted_histograms=tuple(tuple(int(n) for n in row) for row in host.emitted_BP[:sequences]),
            distinct_by_layer=tuple(int(n) for n in host.distinct_L),
            live_rows=int(host.live_rows),
        )

    def __add__(self, other: "DecodeStats") -> "DecodeStats":
        """Figures of both together; the histograms keep a row for every sequence of each."""
        return DecodeStats(
            prefill_seconds=self.prefill_seconds + other.prefill_seconds,
            decode_seconds=self.decode_seconds + other.decode_seconds,
            verifications=self.verifications + other.verifications,
            emitted_histograms=self.emitted_histograms + other.emitted_histograms,
            distinct_by_layer=tuple(
                a + b for a, b in zip(self.distinct_by_layer, other.distinct_by_layer, strict=True)
            ),
            live_rows=self.live_rows + other.live_rows,
        )

    @property
    def emitted(self) -> int:
        """Tokens that decoding emitted, all sequences together."""
        return sum((j + 1) * n for row in self.emitted_histograms for j, n in enumerate(row))

    @property
    def tau(self) -> float:
        """Acceptance length: tokens per verification of a sequence, bonus included; nan when there was none."""
        passes = sum(n for row in self.emitted_histograms for n in row)
        return self.emitted / passes if passes else float("nan")

    @property
    def u(self) -> float:
        """U: mean over MoE layers of the distinct experts a verification touches; nan when there was none."""
        if not self.verifications or not self.distinct_by_layer:
            return float("nan")
        return float(np.mean(self.distinct_by_layer)) / self.verifications

    @property
    def rows(self) -> float:
        """Mean live rows per verification; nan when there was none."""
        return self.live_rows / self.verifications if self.verifications else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """Decoding throughput; nan when nothing was decoded."""
        return self.emitted / self.decode_seconds if self.emitted else float("nan")
