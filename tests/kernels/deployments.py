"""Expert layers of real models as one device of eight holds them, without weights."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ecospec_jax.kernels import ClampedSwiglu, ExpertWeights, Fp8, Matrix, Mxfp4, Plain, Swiglu

Arguments = tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, ExpertWeights]


@dataclass(frozen=True)
class Deployment:
    """Sizes on one device; gpt-oss also has alternating rows and biases."""

    storage: str
    hidden: int
    ffn: int
    experts: int
    k: int

    @property
    def activation(self) -> Swiglu | ClampedSwiglu:
        return ClampedSwiglu() if self.storage == "mxfp4" else Swiglu()

    def arguments(self, rows: int) -> Arguments:
        """What the op takes, but for its options."""
        shape = jax.ShapeDtypeStruct

        def matrix(out: int, inputs: int) -> Matrix:
            lead = (self.experts, out)
            if self.storage == "mxfp4":
                groups = inputs // 32
                return Mxfp4(shape((*lead, groups, 16), jnp.uint8), shape((*lead, groups), jnp.uint8))
            if self.storage == "fp8":
                grid = (self.experts, -(-out // 128), -(-inputs // 128))
                return Fp8(shape((*lead, inputs), jnp.float8_e4m3fn), shape(grid, jnp.float32))
            return Plain(shape((*lead, inputs), jnp.dtype(self.storage)))

        def bias(size: int) -> jax.ShapeDtypeStruct:
            return shape((self.experts, size), jnp.bfloat16)

        down = matrix(self.hidden, self.ffn)
        if self.storage == "mxfp4":
            both = matrix(2 * self.ffn, self.hidden)
            experts = ExpertWeights(both, down, bias(2 * self.ffn), bias(self.hidden))
        else:
            experts = ExpertWeights((matrix(self.ffn, self.hidden),) * 2, down)
        choices = (rows, self.k)
        return shape((rows, self.hidden), jnp.bfloat16), shape(choices, jnp.int32), shape(choices, jnp.float32), experts


DEPLOYMENTS = {
    "qwen3-235b-tp8": Deployment("bfloat16", 4096, 192, 128, 8),
    "qwen3-235b-ep8": Deployment("bfloat16", 4096, 1536, 16, 8),
    "gpt-oss-120b-tp8": Deployment("mxfp4", 2880, 384, 128, 4),  # 360 padded
    "gpt-oss-120b-ep8": Deployment("mxfp4", 2880, 2880, 16, 4),
    "deepseek-v3.1-tp8": Deployment("fp8", 7168, 256, 256, 8),
    "deepseek-v3.1-ep8": Deployment("fp8", 7168, 2048, 32, 8),
}
