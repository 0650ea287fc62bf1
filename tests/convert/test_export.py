"""Models written as published checkpoints and converted again: the same configs, the same numbers, bit for bit."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from convert import convert
from convert.export import export_target
from ecospec_jax import Decoder
from ecospec_jax.checkpoint import parameters, published_dtypes
from ecospec_jax.config import MtpConfig, RopeConfig
from ecospec_jax.models.deepseek_v3 import DeepseekV3
from ecospec_jax.models.mtp import Mtp
from tests.parity.fp8 import CONFIG as FP8
from tests.parity.fp8 import random_fp8

F32 = jnp.dtype("float32")
CONFIG = replace(FP8, rope=RopeConfig(500.0, "yarn", 4.0, 16, mscale=1.0, mscale_all_dim=0.5))


def published_numbers(module):
    """Parameters as they are stored: bfloat16 but for those of a dtype of their own."""
    dtypes = published_dtypes(module.config)
    for path, variable in parameters(module).items():
        value = variable.get_value()
        variable.set_value(value.astype(dtypes[path]).astype(value.dtype))
    return module


@pytest.fixture(scope="module")
def models() -> tuple[DeepseekV3, Mtp]:
    """A target, whose biases of the router bfloat16 cannot hold, and its MTP module without embedding and head."""
    target = published_numbers(random_fp8(lambda: DeepseekV3(CONFIG, dtype=F32, rngs=nnx.Rngs(0))))
    return target, published_numbers(random_fp8(lambda: Mtp(MtpConfig(CONFIG), dtype=F32, rngs=nnx.Rngs(1)), seed=1))


def test_deepseek_v3_with_its_mtp_module(models: tuple[DeepseekV3, Mtp], tmp_path: Path) -> None:
    target, mtp = models
    source = tmp_path / "source"
    export_target(target, source, mtp=mtp, eos_token_ids=[3, 5], pad_token_id=5)
    convert(source, tmp_path / "converted", drafter=source)
    loaded = Decoder.load(tmp_path / "converted", dtype="float32")
    assert isinstance(loaded.drafter, Mtp) and loaded.drafter.config == mtp.config
    assert loaded.target.config == CONFIG and loaded.eos_ids == (3, 5)
    for ours, theirs, borrowed in ((target, loaded.target, ()), (mtp, loaded.drafter, ("embedding", "head"))):
        expected, found = parameters(ours), parameters(theirs)
        assert expected.keys() == found.keys()
        for path in expected:
            if not path.startswith(borrowed or "nothing"):
                assert expected[path].get_value().dtype == found[path].get_value().dtype
                np.testing.assert_array_equal(expected[path].get_value(), found[path].get_value(), err_msg=path)
    bias = np.asarray(parameters(target)["layers.1.moe.router.bias"].get_value())
    assert not np.array_equal(bias, bias.astype(jnp.bfloat16))


def test_deepseek_v3_as_others_name_it(models: tuple[DeepseekV3, Mtp], tmp_path: Path) -> None:
    """Dtypes and names of the published files (docs/formats.md A.3), and no second embedding for the MTP module."""
    target, mtp = models
    export_target(target, tmp_path, mtp=mtp, eos_token_ids=[3], pad_token_id=5)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1 and config["quantization_config"]["scale_fmt"] == "ue8m0"
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    experts = CONFIG.num_experts * 3 * 2  # matrices, and factors beside each
    assert sum(".mlp.experts." in name and name.startswith("model.layers.2.") for name in dtypes) == experts
    for name, dtype in {
        "model.layers.1.mlp.experts.5.down_proj.weight": "F8_E4M3",
        "model.layers.1.mlp.experts.5.down_proj.weight_scale_inv": "F32",
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv": "F32",
        "model.layers.1.mlp.gate.weight": "BF16",
        "model.layers.1.mlp.gate.e_score_correction_bias": "F32",
        "model.layers.2.eh_proj.weight": "BF16",
        "model.layers.2.shared_head.norm.weight": "BF16",
    }.items():
        assert dtypes[name] == dtype, name
    assert "model.layers.2.embed_tokens.weight" not in dtypes and "model.layers.2.shared_head.head.weight" not in dtypes


def test_what_is_not_published_is_refused(tmp_path: Path) -> None:
    plain = DeepseekV3(replace(CONFIG, storage="plain"), dtype=F32, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="published with fp8 matrices and yarn rope"):
        export_target(plain, tmp_path, eos_token_ids=[3], pad_token_id=5)
