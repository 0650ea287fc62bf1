"""What decoding learns about itself: the rate it makes, whether drafting pays, how likely drafts are accepted.

Nothing here can change the output, only its speed: the sets of verified nodes depend on committed tokens alone.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ecospec_jax.calibration import Calibration
from ecospec_jax.config import RoutingShape, SpecConfig
from ecospec_jax.cost import CostModel

MEMORY = 256.0  # steps that the overall rate looks back
DRAFT_MEMORY = 64.0  # steps that drafting is judged by: shorter, so that it ends soon where it stops paying
TRIAL = 16  # steps drafted before drafting is judged by its mean alone
HOPE = 2.0  # standard errors of the mean that drafting is forgiven while it is on trial
FIRST_WAIT = 16  # plain steps before the first probe; each probe in vain doubles them
_PRIOR_STEPS = 4.0  # plain steps that the warm start counts for


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ledger:
    """Running sums of tokens and of what they cost; older steps fade."""

    tokens: Float[Array, ""]
    cost: Float[Array, ""]

    @property
    def rate(self) -> Float[Array, ""]:
        """Tokens per unit of cost."""
        return self.tokens / jnp.maximum(self.cost, 1e-30)

    def add(self, tokens: Array, cost: Array, memory: float = MEMORY) -> "Ledger":
        """One more step."""
        keep = 1 - 1 / memory
        return Ledger(self.tokens * keep + tokens, self.cost * keep + cost)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adaptation:
    """Estimates that steps update.

    Attributes:
        calibration: of the acceptance probabilities.
        overall: all steps; its rate is the one that selection weighs cost with.
        drafted: the steps that drafted.
        undrafted: the same steps, had they been plain: one token a sequence at the cost of the roots alone.
        trials: steps that drafted, up to `TRIAL`.
        idle: steps since the last that drafted.
        wait: plain steps before the next probe.
    """

    calibration: Calibration
    overall: Ledger
    drafted: Ledger
    undrafted: Ledger
    trials: Int[Array, ""]
    idle: Int[Array, ""]
    wait: Int[Array, ""]

    @staticmethod
    def fresh(cost: CostModel, routing: RoutingShape, batch: int, calibration: Calibration) -> "Adaptation":
        """Before the first step: the rate of plain decoding, if routing were uniform."""
        absent = (1 - routing.k / routing.experts) ** batch
        plain = cost.step(routing.experts * (1 - absent), rows=batch)
        nothing = Ledger(jnp.zeros(()), jnp.zeros(()))
        overall = Ledger(jnp.float32(_PRIOR_STEPS * batch), jnp.float32(_PRIOR_STEPS * plain))
        return Adaptation(calibration, overall, nothing, nothing, jnp.int32(0), jnp.int32(0), jnp.int32(FIRST_WAIT))

    @property
    def pays(self) -> Bool[Array, ""]:
        """Whether the steps that drafted made more tokens per cost than they would have made plainly."""
        return self.drafted.rate >= self.undrafted.rate

    def drafts(self, spec: SpecConfig) -> Bool[Array, ""]:
        """Whether to draft: while its trial leaves hope, while it pays, and now and then to see whether it does again.

        The tokens that a sequence gains in a step scatter by about 1 around their mean.
        """
        sequences = self.undrafted.tokens
        hopeful = self.drafted.tokens + HOPE * jnp.sqrt(sequences) >= self.undrafted.rate * self.drafted.cost
        return ((self.trials < TRIAL) & hopeful) | self.pays | (self.idle >= jnp.minimum(self.wait, spec.probe_every))

    def observe(
        self,
        cost: CostModel,
        spec: SpecConfig,
        *,
        drafted: Bool[Array, ""],
        emitted: Int[Array, ""],
        sequences: Int[Array, ""],
        pairs: Int[Array, ""],
        rows: Int[Array, ""],
        root_pairs: Int[Array, ""],
    ) -> "Adaptation":
        """Books one step.

        Args:
            cost: the cost model.
            spec: says how long probes may be apart.
            drafted: whether the step drafted.
            emitted: tokens of all sequences.
            sequences: sequences that took part; a step without any changes nothing.
            pairs: distinct (layer, expert) pairs that the verification touched.
            rows: rows that the verification processed.
            root_pairs: distinct pairs of the roots alone.
        """
        verification = cost.fixed + cost.per_expert * pairs + cost.per_row * rows
        spent = verification + jnp.where(drafted, cost.draft + cost.predict, 0.0)
        plain = cost.fixed + cost.per_expert * root_pairs + cost.per_row * sequences
        nothing = jnp.zeros(())
        after = replace(
            self,
            overall=self.overall.add(emitted, spent),
            drafted=self.drafted.add(nothing, nothing, DRAFT_MEMORY),  # what drafting gave long ago says less
            undrafted=self.undrafted.add(nothing, nothing, DRAFT_MEMORY),
            idle=self.idle + 1,
        )
        if_drafted = replace(
            after,
            drafted=self.drafted.add(emitted, spent, DRAFT_MEMORY),
            undrafted=self.undrafted.add(sequences, plain, DRAFT_MEMORY),
            trials=jnp.minimum(self.trials + 1, TRIAL),
            idle=jnp.int32(0),
        )
        longer = jnp.where(self.idle > 0, jnp.minimum(2 * self.wait, spec.probe_every), self.wait)
        if_drafted = replace(if_drafted, wait=jnp.where(if_drafted.pays, FIRST_WAIT, longer))
        chosen = jax.tree.map(lambda yes, no: jnp.where(drafted, yes, no), if_drafted, after)
        return jax.tree.map(lambda new, old: jnp.where(sequences > 0, new, old), chosen, self)
