"""What all trainings share: one optimiser step after another, and all that it takes to go on exactly.

What is compiled serves every model of the same form, whichever trainer or caller it belongs to.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import optax
from flax import nnx
from jaxtyping import Array, Float

from ecospec_jax.checkpoint import borrowed_parameters

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


class Trainer(Generic[ModelT, BatchT]):
    """A model in training: its trained parameters, the frozen rest, and the optimiser's state."""

    def __init__(
        self,
        model: ModelT,
        transformation: optax.GradientTransformation,
        loss: Callable[[ModelT, BatchT], Float[Array, ""]],
        *,
        frozen: Sequence[str] = (),
    ) -> None:
        """Takes the model's values over; read them back from `model`.

        What it borrows from its target stays as it is, and so do the submodules named in `frozen`.
        """
        borrowed = borrowed_parameters(model.config)

        def is_trained(path: tuple[Any, ...], value: Any) -> bool:
            stays = path[0] in frozen or ".".join(map(str, path)) in borrowed
            return isinstance(value, nnx.Param) and not stays

        self._graph, trained, self._frozen = nnx.split(model, is_trained, ...)
        self._transformation, self._loss = transformation, loss
        # Committed to a device as restored and borrowed values are; else the second step might be compiled anew.
        initial = trained, transformation.init(trained)
        self._trained, self._optimiser_state = jax.device_put(initial, jax.devices()[0])

    def step(self, batch: BatchT) -> Float[Array, ""]:
        """One optimiser step; returns the loss before it."""
        self._trained, self._optimiser_state, loss = _update(
            self._graph,
            self._loss,
            self._transformation,
            self._trained,
            self._optimiser_state,
            self._frozen,
            batch,
        )
        return loss

    @property
    def model(self) -> ModelT:
        """The model with its present values."""
        return nnx.merge(self._graph, self._trained, self._frozen)

    @property
    def state(self) -> Any:
        """What a checkpoint must hold to go on exactly: trained parameters and the optimiser's state."""
        return {"trained": nnx.to_pure_dict(self._trained), "optimiser": jax.tree.leaves(self._optimiser_state)}

    def restore(self, state: Any) -> None:
        """Takes up a `state`."""
        nnx.replace_by_pure_dict(self._trained, state["trained"])
        structure = jax.tree.structure(self._optimiser_state)
        self._optimiser_state = jax.tree.unflatten(structure, state["optimiser"])


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(3, 4))
def _update(
    graph: Any,
    loss: Callable[[Any, Any], Array],
    transformation: optax.GradientTransformation,
    trained: Any,
    optimiser_state: Any,
    frozen: Any,
    batch: Any,
) -> tuple[Any, Any, Array]:
    def loss_of(values: Any) -> Array:
        return loss(nnx.merge(graph, values, frozen), batch)

    value, gradients = jax.value_and_grad(loss_of)(trained)
    changes, optimiser_state = transformation.update(gradients, optimiser_state, trained)
    return optax.apply_updates(trained, changes), optimiser_state, value
