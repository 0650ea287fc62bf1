"""What all trainings share: one optimiser step after another, and all that it takes to go on exactly.

What is compiled serves every model of the same form, whichever trainer or caller it belongs to.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from ecospec_jax.checkpoint import borrowed_parameters
from ecospec_jax.sharding import data_parallel

ModelT = TypeVar("ModelT", bound=Any)  # a module with a config
BatchT = TypeVar("BatchT")
ResultT = TypeVar("ResultT")


def evaluate(function: Callable[..., ResultT], model: Any, batch: Any, *static: Any) -> ResultT:
    """`function(model, batch, *static)`, compiled; the function itself and `static` must be hashable."""
    graph, state = nnx.split(model)
    return _evaluate(function, graph, static, state, batch)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _evaluate(function: Callable[..., Any], graph: Any, static: tuple[Any, ...], state: Any, batch: Any) -> Any:
    return function(nnx.merge(graph, state), batch, *static)


def _alike(batch: Any) -> float:
    """All parts of a batch weigh the same."""
    return 1.0


class Trainer(Generic[ModelT, BatchT]):
    """A model in training: its trained parameters, the frozen rest, and the optimiser's state.

    The model computes in the dtypes that it has; trained parameters and the optimiser's state are float32.
    """

    def __init__(
        self,
        model: ModelT,
        transformation: optax.GradientTransformation,
        loss: Callable[[ModelT, BatchT], Float[Array, ""]],
        *,
        parts: int = 1,
        weigh: Callable[[BatchT], Any] = _alike,
        devices: int = 1,
        frozen: Sequence[str] = (),
    ) -> None:
        """Takes the model's values over; read them back from `model`. What it borrows from its target stays.

        Args:
            model: has a config.
            transformation: the optimiser.
            loss: of a batch; a mean.
            parts: a step works its batch off in so many parts, so that less is held; it learns the same.
            weigh: weight of a part in the mean that `loss` is of the whole batch.
            devices: how many share each part; all have all parameters. `parts * devices` must divide a batch.
            frozen: submodules that stay as they are.
        """
        borrowed = borrowed_parameters(model.config)

        def is_trained(path: tuple[Any, ...], value: Any) -> bool:
            stays = path[0] in frozen or ".".join(map(str, path)) in borrowed
            return isinstance(value, nnx.Param) and not stays

        self._graph, trained, others = nnx.split(model, is_trained, ...)
        self._whole, self._split = data_parallel(devices)
        dtypes = tuple(leaf.dtype for leaf in jax.tree.leaves(trained))
        self._recipe = Recipe(self._graph, loss, transformation, dtypes, parts, weigh, self._whole)
        trained = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trained)
        # Committed to devices as restored and borrowed values are; else the second step might be compiled anew.
        initial = trained, transformation.init(trained), others
        self._trained, self._optimiser_state, self._frozen = jax.device_put(initial, self._whole)

    def step(self, batch: BatchT) -> Float[Array, ""]:
        """One optimiser step; returns the loss before it."""
        self._trained, self._optimiser_state, loss = _update(
            self._recipe, self._trained, self._optimiser_state, self._frozen, jax.device_put(batch, self._split)
        )
        return loss

    @property
    def model(self) -> ModelT:
        """The model with its present values."""
        return nnx.merge(self._graph, self._recipe.computed(self._trained), self._frozen)

    @property
    def state(self) -> Any:
        """What a checkpoint must hold to go on exactly: trained parameters and the optimiser's state."""
        return {"trained": nnx.to_pure_dict(self._trained), "optimiser": jax.tree.leaves(self._optimiser_state)}

    def restore(self, state: Any) -> None:
        """Takes up a `state`."""
        state = jax.device_put(state, self._whole)
        nnx.replace_by_pure_dict(self._trained, state["trained"])
        structure = jax.tree.structure(self._optimiser_state)
        self._optimiser_state = jax.tree.unflatten(structure, state["optimiser"])


@dataclass(frozen=True)
class Recipe:
    """All of a step but its values; see `Trainer`.

    Attributes:
        graph: the model's form.
        loss: of a batch.
        transformation: the optimiser.
        dtypes: in which the trained parameters take part, in the order of their leaves.
        parts: of a batch.
        weigh: weight of a part.
        whole: where parameters are.
    """

    graph: Any
    loss: Callable[[Any, Any], Array]
    transformation: optax.GradientTransformation
    dtypes: tuple[Any, ...]
    parts: int
    weigh: Callable[[Any], Any]
    whole: NamedSharding

    def computed(self, trained: Any) -> Any:
        """Trained parameters in the dtypes that the model computes in."""
        leaves, structure = jax.tree.flatten(trained)
        return jax.tree.unflatten(structure, [x.astype(dtype) for x, dtype in zip(leaves, self.dtypes, strict=True)])

    def split(self, batch: Any) -> Any:
        """The parts of a batch along a new first axis. Neighbours are dealt out, so each device keeps what it has."""
        return jax.tree.map(lambda x: x.reshape(-1, self.parts, *x.shape[1:]).swapaxes(0, 1), batch)


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _update(recipe: Recipe, trained: Any, optimiser_state: Any, frozen: Any, batch: Any) -> tuple[Any, Any, Array]:
    def loss_of(values: Any, part: Any, share: Array) -> Array:
        return share * recipe.loss(nnx.merge(recipe.graph, recipe.computed(values), frozen), part)

    def add(total: Any, part_and_share: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(trained, *part_and_share)), None

    parts = recipe.split(batch)
    weights_P = jnp.asarray(jax.vmap(recipe.weigh, axis_size=recipe.parts)(parts), jnp.float32)
    shares_P = weights_P / jnp.maximum(jnp.sum(weights_P), 1)
    nothing = jnp.zeros(()), jax.tree.map(jnp.zeros_like, trained)
    (loss, gradients), _ = lax.scan(add, nothing, (parts, shares_P))
    changes, optimiser_state = recipe.transformation.update(gradients, optimiser_state, trained)
    new = optax.apply_updates(trained, changes), optimiser_state
    return *lax.with_sharding_constraint(new, recipe.whole), loss
