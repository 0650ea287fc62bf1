"""Predictor checkpoints: what is stored comes back, and what does not fit the target or its own manifest is refused."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ecospec_jax import Decoder
from ecospec_jax.checkpoint import MANIFEST, parameters
from ecospec_jax.config import SamplingConfig, SpecConfig
from ecospec_jax.errors import UserError
from ecospec_jax.models.backbone_predictor import BackbonePredictor
from ecospec_jax.predictor_checkpoint import load_predictors, save_predictors
from ecospec_jax.predictor_config import FrequencyConfig, TokenTableConfig
from tests import tiny_predictors
from tests.parity.compare import causal_rows
from tests.tiny import quick_compilation
from tests.tiny_predictors import BRIDGES, ROUTING, TARGET, make_target, write_converted

__all__ = ["quick_compilation"]
F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
HASH = "ab" * 32
TABLE, FREQUENCY = TokenTableConfig(TARGET.vocab_size, ROUTING), FrequencyConfig(ROUTING)


def save(folder: Path, dtype: jnp.dtype = F32, target_hash: str = HASH) -> Path:
    return tiny_predictors.write_predictors(folder, target_hash, dtype)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("predictors") / "predictors")


@pytest.fixture
def folder(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "predictors"))


def load(folder: Path, target_hash: str = HASH, dtype: jnp.dtype = F32) -> dict:
    return load_predictors(folder, target_hash, dtype, make_target())


def test_round_trip(pristine) -> None:
    """Every value and the modules' form; the embedding is the target's array itself and not in the files."""
    loaded = load(pristine)
    assert loaded.keys() == tiny_predictors.some_predictors().keys()
    for name, (_, model) in tiny_predictors.some_predictors().items():
        ours, expected = parameters(loaded[name]), parameters(model)
        assert nnx.graphdef(loaded[name]) == nnx.graphdef(model)
        for path, variable in expected.items():
            np.testing.assert_array_equal(ours[path].get_value(), variable.get_value(), err_msg=f"{name} {path}")
            assert ours[path].get_value().dtype == variable.get_value().dtype
    assert loaded["backbone"].embedding.weight.get_value() is make_target().embedding.weight.get_value()
    manifest = json.loads((pristine / MANIFEST).read_text())
    assert not [path for piece in manifest["pieces"].values() for path in piece["tensors"] if "embedding" in path]
    assert manifest["overlap"]["backbone"] == [0.75, 0.5] and manifest["recipe"] == {"steps": "3"}
    assert not list(pristine.parent.glob("*.partial"))


@pytest.mark.parametrize("bridge", ["shared", "retokenise"])
def test_backbones_with_an_embedding_of_their_own(bridge: str, tmp_path) -> None:
    """It is stored, and so is the table of sub-tokens; another vocabulary or an impossible bridge is refused."""
    config, folder = BRIDGES[bridge], tmp_path / "predictors"
    model = tiny_predictors.make_backbone(config)
    save_predictors(folder, {"own": (config, model)}, target_hash=HASH, overlap={}, recipe={}, dtype=BF16)
    loaded = load(folder)["own"]
    assert loaded.config == config and nnx.graphdef(loaded) == nnx.graphdef(model)
    for path, variable in parameters(model).items():
        value = variable.get_value()
        stored = value.astype(BF16).astype(F32) if value.dtype == F32 else value
        np.testing.assert_array_equal(parameters(loaded)[path].get_value(), stored, err_msg=path)
    stored = json.loads((folder / MANIFEST).read_text())["pieces"]["own/top"]["tensors"]
    assert "embedding.weight" in stored and ("subtokens.ids_VS" in stored) == (bridge == "retokenise")

    file, manifest = folder / MANIFEST, json.loads((folder / MANIFEST).read_text())
    own = manifest["predictors"]["own"]
    for changes, message in (
        ({"vocab_size": 28}, "predictor 'own' has a vocabulary of 28, the target of 29"),
        ({"embedding_size": 12}, "the backbone's own embedding has its hidden size 10, not 12"),
        ({"bridge": {"kind": "guess"}}, "predictors.own"),
        ({"bridge": own["bridge"] | {"kind": "retokenise", "vocab_size": 24, "subtokens": 3}}, "piece 'own/top'"),
        ({"bridge": {"kind": "retokenise", "vocab_size": 23, "subtokens": 0}}, "at least 1 sub-token, not 0"),
    ):
        file.write_text(json.dumps(manifest | {"predictors": {"own": own | changes}}))
        with pytest.raises(UserError, match=f"^{file}: .*{message}") as error:
            load(folder)
        assert "\n" not in str(error.value)


def test_dtypes(tmp_path) -> None:
    """Weights are stored in the asked dtype and loaded in the compute dtype; bit words are never cast."""
    folder = save(tmp_path / "bf16", BF16)
    exact = parameters(tiny_predictors.some_predictors()["backbone"][1])
    for dtype in (F32, BF16):
        loaded = load(folder, dtype=dtype)
        for path, variable in parameters(loaded["backbone"]).items():
            if not path.startswith("embedding"):
                expected = exact[path].get_value().astype(BF16).astype(dtype)
                np.testing.assert_array_equal(variable.get_value(), expected, err_msg=path)
        assert loaded["token_table"].bits_VLW.get_value().dtype == jnp.uint32
        table = tiny_predictors.some_predictors()["token_table"][1]
        np.testing.assert_array_equal(loaded["token_table"].bits_VLW[...], table.bits_VLW[...])


def test_an_existing_folder_is_never_overwritten(folder) -> None:
    before = (folder / MANIFEST).read_bytes()
    with pytest.raises(UserError, match=f"^{folder}: already exists"):
        save(folder, BF16)
    assert (folder / MANIFEST).read_bytes() == before


def test_a_failed_save_leaves_no_folder(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"^{tmp_path / 'file' / 'out'}.partial: cannot be written"):
        save(tmp_path / "file" / "out")


def change_config(name: str, **values: object) -> Callable[[dict], None]:
    def edit(manifest: dict) -> None:
        manifest["predictors"][name] |= values

    return edit


def change_routing(name: str, **values: int) -> Callable[[dict], None]:
    def edit(manifest: dict) -> None:
        manifest["predictors"][name]["routing"] |= values

    return edit


def change_backbone(**values: int) -> Callable[[dict], None]:
    def edit(manifest: dict) -> None:
        manifest["predictors"]["backbone"]["backbone"] |= values

    return edit


REFUSED = {
    "layers": (change_routing("backbone", layers=5), "predictor 'backbone' predicts .*layers=5.* the target routes"),
    "experts": (change_routing("token_table", experts=36), "predictor 'token_table' predicts .*experts=36"),
    "experts per token": (change_routing("frequency", k=2), "predictor 'frequency' predicts .*k=2"),
    "vocabulary": (change_config("token_table", vocab_size=30), "predictor 'token_table' has a vocabulary of 30"),
    "backbone's vocabulary": (
        change_config("backbone", vocab_size=28),
        "'backbone' has a vocabulary of 28, the target",
    ),
    "target": (lambda m: m.update(target_hash="cd" * 32), "made for another target \\(hash cdcdcdcdcdcd\\)"),
    "format": (lambda m: m.update(format=2), "format 2 is not 1"),
    "family": (change_config("frequency", family="sun"), "predictors.frequency"),
    "width": (change_backbone(hidden_size=11), "piece 'backbone/top': tensor .* has shape .*; the config asks for"),
    "depth": (change_backbone(num_layers=3), "piece.* disagree on"),
    "impossible heads": (change_backbone(num_kv_heads=2), "num_heads must be a multiple of num_kv_heads"),
    "a piece too few": (
        lambda m: m["pieces"].pop("token_table/top"),
        "pieces and config disagree on 'token_table/top'",
    ),
    "a missing key": (lambda m: m.pop("recipe"), "recipe: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(folder, case: str) -> None:
    """One line that names the file."""
    edit, message = REFUSED[case]
    file = folder / MANIFEST
    manifest = json.loads(file.read_text())
    edit(manifest)
    file.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=f"^{file}: .*{message}") as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_another_targets_predictors_are_refused(pristine) -> None:
    with pytest.raises(UserError, match=f"^{pristine / MANIFEST}: the predictors were made for another target"):
        load(pristine, target_hash="ef" * 32)
    smaller = make_target(replace(TARGET, num_experts=33))
    with pytest.raises(UserError, match="predicts RoutingShape.*experts=37.*routes RoutingShape.*experts=33"):
        load_predictors(pristine, HASH, F32, smaller)


def test_a_folder_without_manifest_is_refused(tmp_path) -> None:
    for content in (None, "{", "[]"):
        if content is not None:
            (tmp_path / MANIFEST).write_text(content)
        with pytest.raises(UserError, match=f"^{tmp_path / MANIFEST}: "):
            load(tmp_path)


@pytest.mark.parametrize("how", ["truncated", "flipped bit", "missing"])
@pytest.mark.parametrize("name", ["backbone", "token_table"])
def test_a_damaged_piece_is_named(folder, how: str, name: str) -> None:
    file = max((f for f in (folder / name).rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    if how == "truncated":
        file.write_bytes(content[:-1])
    elif how == "flipped bit":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()
    with pytest.raises(UserError, match=f"^{re.escape(str(file))}: ") as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_decoder_loads_predictors_of_its_target(tmp_path) -> None:
    """Through the front door: methods find them by name; those of another target are refused."""
    converted, target_hash = write_converted(tmp_path / "converted")
    own, other = save(tmp_path / "own", target_hash=target_hash), save(tmp_path / "other")
    decoder = Decoder.load(converted, predictor=own)
    assert decoder.target_hash == target_hash
    for method in ("ecospec", "ecospec-table", "ecospec-frequency"):
        assert decoder.program(method, SpecConfig(), SamplingConfig())
    with pytest.raises(UserError, match=f"^{other / MANIFEST}: the predictors were made for another target"):
        Decoder.load(converted, predictor=other)
    with pytest.raises(UserError, match=f"^{tmp_path / 'none' / MANIFEST}: cannot be read"):
        Decoder.load(converted, predictor=tmp_path / "none")


def test_loaded_predictor_predicts_the_same(pristine) -> None:
    backbone = load(pristine)["backbone"]
    assert isinstance(backbone, BackbonePredictor)
    rows = causal_rows(np.arange(8)[None])
    call = nnx.jit(lambda model, rows: model.logits(rows, model.empty_cache(1, 8))[0])
    expected = call(tiny_predictors.some_predictors()["backbone"][1], rows)
    np.testing.assert_array_equal(jax.device_get(call(backbone, rows)), expected)
