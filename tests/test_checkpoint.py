"""Loading: what does not match the manifest is refused; arrays land where and as they are wanted."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convert import convert
from ecospec_jax.checkpoint import load_drafter, load_target, parameters, read_manifest
from ecospec_jax.errors import UserError
from tests.hf_gpt_oss import write_mxfp4
from tests.hf_models import drafter_tensors, write_drafter, write_target

F32 = jnp.dtype(jnp.float32)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    write_target(folder / "target")
    write_drafter(folder / "drafter", drafter_tensors())
    convert(folder / "target", folder / "converted", drafter=folder / "drafter")
    return folder / "converted"


@pytest.fixture
def converted(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "converted"))


def load(folder: Path, dtype=F32):
    manifest = read_manifest(folder)
    target = load_target(folder, manifest, dtype)
    return target, load_drafter(folder, manifest, dtype, target)


def test_casts_weights_but_not_ids(pristine):
    exact, _ = load(pristine)
    target, drafter = load(pristine, jnp.dtype(jnp.bfloat16))
    assert target.dtype == jnp.bfloat16
    for path, variable in parameters(target).items():
        np.testing.assert_array_equal(variable[...], parameters(exact)[path][...].astype(jnp.bfloat16), err_msg=path)
    assert parameters(drafter)["target_ids"][...].dtype == jnp.int32
    assert {v[...].dtype for path, v in parameters(drafter).items() if path != "target_ids"} == {
        jnp.dtype(jnp.bfloat16)
    }


def test_quantised_matrices_keep_their_bytes(tmp_path):
    """Stored as uint8 whatever the target computes in; another dtype is refused."""
    tensors = write_mxfp4(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out")
    target, _ = load(tmp_path / "out", jnp.dtype(jnp.bfloat16))
    found = parameters(target)
    for part in ("blocks", "scales"):
        stored = found[f"layers.3.moe.experts.down.{part}"][...]
        assert stored.dtype == jnp.uint8
        np.testing.assert_array_equal(stored, tensors[f"model.layers.3.mlp.experts.down_proj_{part}"])
    assert found["layers.3.moe.experts.down_bias"][...].dtype == jnp.bfloat16
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    down = "layers.3.moe.experts.down"
    manifest["pieces"][f"target/{down}"]["tensors"][f"{down}.scales"]["dtype"] = "float32"
    (tmp_path / "out/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="layers.3.moe.experts.down.scales has dtype float32, which is not uint8"):
        load(tmp_path / "out")


def test_drafter_borrows_the_very_array(pristine):
    target, drafter = load(pristine)
    assert drafter.embedding.weight.get_value() is target.embedding.weight.get_value()


def test_modules_are_those_the_constructor_builds(pristine):
    target, _ = load(pristine)
    built = type(target)(target.config, dtype=F32, rngs=nnx.Rngs(0))
    assert nnx.graphdef(target) == nnx.graphdef(built)
    metadata = lambda module: {path: variable.get_metadata() for path, variable in parameters(module).items()}  # noqa: E731
    assert metadata(target) == metadata(built)


ON_TWO_DEVICES = """
import sys
from pathlib import Path
import jax.numpy as jnp
import numpy as np
from ecospec_jax.checkpoint import borrowed_parameters, load_drafter, load_target, parameters, read_manifest
from ecospec_jax.sharding import Placement

folder, f32, placement = Path(sys.argv[1]), jnp.dtype(jnp.float32), Placement.create("tp2")
manifest = read_manifest(folder)
alone, target = (load_target(folder, manifest, f32, where) for where in (None, placement))
drafter = load_drafter(folder, manifest, f32, target, placement.replicated)
served = placement.for_model(manifest.target)
lent = borrowed_parameters(manifest.drafter)
for module, where in ((target, served), (drafter, placement.replicated)):
    for path, variable in parameters(module).items():
        value, axes = variable.get_value(), variable.get_metadata()["logical_axes"]
        at = served if module is drafter and path in lent else where
        assert value.sharding == at.sharding(axes, value.shape), path
for path, variable in parameters(target).items():
    np.testing.assert_array_equal(variable[...], parameters(alone)[path][...], err_msg=path)
query = target.layers[0].attention.q.weight.get_value()
assert [shard.data.shape for shard in query.addressable_shards] == [(30, 24), (30, 24)]
assert len(parameters(alone)["norm.weight"].get_value().sharding.device_set) == 1
"""


def test_placement_on_two_devices(pristine):
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ON_TWO_DEVICES, str(pristine)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"vocab_size": 71}, "vocabulary is 67, but the target's is 71"),
        ({"hidden_size": 26}, "target hidden size is 24, but the target's is 26"),
        ({"num_hidden_layers": 4}, "boundary 5 is past the target's 4 layers"),
    ],
)
def test_a_drafter_of_another_target_is_refused(pristine, tmp_path, change, complaint):
    write_target(tmp_path / "target", **change)
    convert(tmp_path / "target", tmp_path / "converted")
    target = load_target(tmp_path / "converted", read_manifest(tmp_path / "converted"), F32)
    with pytest.raises(UserError, match=complaint) as caught:
        load_drafter(pristine, read_manifest(pristine), F32, target)
    assert str(pristine) in str(caught.value)


def test_without_drafter(tmp_path):
    write_target(tmp_path / "target", num_hidden_layers=1)
    convert(tmp_path / "target", tmp_path / "out")
    assert load(tmp_path / "out")[1] is None


def largest_file(folder: Path) -> Path:
    return max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def flip_bit(folder: Path) -> None:
    data = bytearray(largest_file(folder).read_bytes())
    data[len(data) // 2] ^= 1
    largest_file(folder).write_bytes(data)


def swap(folder: Path, other: Path) -> None:
    folder.rename(folder.with_name("aside"))
    other.rename(folder)
    folder.with_name("aside").rename(other)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: flip_bit(f / "target/layers.3"), "target/layers.3/.*: the file was changed or damaged"),
        (lambda f: largest_file(f / "drafter/top").write_bytes(b""), "drafter/top/.*: the file was changed or damaged"),
        (lambda f: largest_file(f / "target/top").unlink(), "target/top/.*: cannot be read: .*No such file"),
        (lambda f: shutil.rmtree(f / "target/layers.7"), "target/layers.7/.*: cannot be read: .*No such file"),
        (lambda f: swap(f / "target/layers.1", f / "target/layers.2"), "target/layers.1/.*: "),
        (lambda f: (f / "manifest.json").unlink(), "converted: no manifest.json, so no finished conversion"),
        (lambda f: (f / "manifest.json").write_text("{"), "manifest.json: Expecting property name"),
        (lambda f: (f / "manifest.json").write_text("[]"), "manifest.json: format None is not 2"),
    ],
)
def test_damaged_files_are_refused(converted, damage, message):
    damage(converted)
    with pytest.raises(UserError, match=message) as error:
        load(converted)
    assert str(error.value).startswith(str(converted))


Q = "layers.3.attention.q.weight"


def set_tensor(**edit):
    return lambda m: m["pieces"]["target/layers.3"]["tensors"][Q].update(edit)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m.update(format=0), "manifest.json: format 0 is not 2; convert the checkpoint again"),
        (lambda m: m["target"].pop("vocab_size"), "manifest.json: target.qwen3_moe.vocab_size: Field required"),
        (lambda m: m["target"].update(family="gpt"), "manifest.json: target: Input tag"),
        (lambda m: m.update(spare=1), "manifest.json: spare: Unexpected keyword argument"),
        (lambda m: m["target"].update(head_dim=11), "manifest.json: head_dim must be even"),
        (lambda m: m.update(format=1), "manifest.json: format 1 is not 2; convert the checkpoint again"),
        (lambda m: m["target"].update(num_layers=7), "manifest.json: pieces and config disagree on 'target/layers.7"),
        (lambda m: m["pieces"].pop("drafter/top"), "manifest.json: pieces and config disagree on 'drafter/top'"),
        (lambda m: m["target"].update(attention_bias=True), "'target/layers.0' and the config disagree on"),
        (lambda m: m["target"].update(num_heads=4), "has shape .*; the config asks for"),
        (lambda m: m["drafter"].update(own_embedding=True), "'drafter/top' and the config disagree on tensor"),
        (set_tensor(dtype="int8"), f"tensor {Q} has dtype int8, which is not bfloat16 or"),
        # Orbax would cast to this dtype without a word.
        (set_tensor(dtype="bfloat16"), rf"target/layers.3: tensor {Q} is float32\(60, 24\), not as manifest"),
    ],
)
def test_edited_manifest_is_refused(converted, edit, message):
    manifest = json.loads((converted / "manifest.json").read_text())
    edit(manifest)
    (converted / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=message) as error:
        load(converted)
    assert str(error.value).startswith(str(converted))
