"""Directories that version 0.1 wrote open as they did, here and in PEFT."""

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import lora_pair, write_lora_directory

from lsrdecomp import compress
from lsrdecomp.checkpoints import open_checkpoint, write_lsr
from lsrdecomp.checkpoints.files import changed_files
from lsrdecomp.checkpoints.format import open_bundle
from lsrdecomp.checkpoints.integrity import check_integrity
from lsrdecomp.checkpoints.provenance import read_provenance
from lsrdecomp.compression.export import export_lora
from lsrdecomp.compression.layers import layer_product
from lsrdecomp.compression.settings import CompressionPlan
from lsrdecomp.compression.verify import verify
from lsrdecomp.errors import CheckpointError

OLD = Path(__file__).resolve().parents[1] / "data" / "written-by-0.1"
EXPECTED = json.loads((OLD / "expected.json").read_text())
"""What the code that wrote them read back: of each ΔW its norm, and nine entries."""


def source(folder: Path, name: str):
    """The synthetic adapter that the directory was made from."""
    scales, r, shape = {
        "float-dropped": ((1.0, 1.0, 1e-3, 1e-3), 4, (24, 16)),
        "packed-int4": ((1.0, 0.7, 0.4), 4, (24, 16)),
        "three-factors": ((1.0, 0.5), 8, (27, 16)),
    }[name]
    tensors = {}
    for i, scale in enumerate(scales):
        made = lora_pair(f"layers.{i}.q", *shape, r, i)
        tensors |= {key: (array * scale).astype("float32") for key, array in made.items()}
    tensors["base_model.model.score.weight"] = np.arange(6, dtype="float32").reshape(2, 3)
    config = {"modules_to_save": ["score"], "target_modules": ["q"]}
    return open_checkpoint(write_lora_directory(folder / name, tensors, r=r, **config))


@pytest.mark.parametrize("name", EXPECTED)
def test_an_old_directory_has_the_numbers_it_had(name, tmp_path):
    written, expected = open_checkpoint(OLD / name), EXPECTED[name]
    assert changed_files(OLD / name) == ()
    assert written.adapter_parameters == expected["parameters"]
    assert [layer.name for layer in written.layers] == list(expected["layers"])
    assert list(written.extras) == ["base_model.model.score.weight"]
    for layer in written.layers:
        known = expected["layers"][layer.name]
        assert (layer.dtype, str(layer.shape), [layer.left_rank, layer.right_rank]) == (
            known["dtype"],
            known["shape"],
            known["terms"],
        )
        update = layer_product(layer).to_matrix()
        assert np.linalg.norm(update) == pytest.approx(known["norm"], rel=1e-13)
        assert update[:, :3].ravel()[:9] == pytest.approx(known["update"], abs=1e-11)
    given = source(tmp_path, name)
    check = verify(given, written)
    assert check.source_matches
    assert {layer.name for layer in check.layers} == {layer.name for layer in given.layers}
    assert read_provenance(written)["dropped"] == expected["dropped"]


def in_peft(folder: Path, names: list[str], shape: tuple[int, int]):
    """ΔW of each layer as PEFT has it, and the modules it adapted, on a base of these modules."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    pytest.importorskip("lsrdecomp.adapters")

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = torch.nn.Linear(shape[1], shape[0], bias=False)

        def forward(self, x):
            return self.q(x)

    class Base(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Block() for _ in names)
            self.score = torch.nn.Linear(3, 2, bias=False)

        def forward(self, x):
            return self.layers[0](x)

    base = Base()
    before = {name: base.get_submodule(name).weight.detach().clone() for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(base, str(folder))
        adapted = [
            name for name in names if hasattr(model.base_model.model.get_submodule(name), "lsr_A")
        ]
        score = model.base_model.model.score.modules_to_save["default"].weight
        assert score.detach().tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        merged = model.merge_and_unload()
    updates = {
        name: (merged.get_submodule(name).weight - before[name]).detach().numpy() for name in names
    }
    return updates, adapted


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("written_by", ["0.1", "now"])
def test_peft_opens_old_and_new_directories(name, written_by, tmp_path):
    given = source(tmp_path, name)
    folder = OLD / name
    if written_by == "now":
        plan = json.loads((OLD / name / "compression.json").read_text())["plan"]
        plan = {
            key: tuple(value) if isinstance(value, list) else value for key, value in plan.items()
        }
        folder = compress(given, CompressionPlan(**plan)).save(tmp_path / "now")
    written = open_checkpoint(folder)
    updates, adapted = in_peft(
        folder, [layer.name for layer in given.layers], given.layers[0].shape
    )
    assert adapted == [layer.name for layer in written.layers]
    for layer in written.layers:
        assert updates[layer.name] == pytest.approx(layer_product(layer).to_matrix(), abs=3e-6)
    assert all(not update.any() for other, update in updates.items() if other not in adapted)


INDEX_IN_CONFIG = OLD.parent / "index-in-config"


@pytest.mark.parametrize("name", ["floats", "codes"])
def test_a_directory_with_its_index_in_the_config_opens_as_it_did(name):
    folder = INDEX_IN_CONFIG / name
    expected = json.loads((INDEX_IN_CONFIG / "expected.json").read_text())[name]
    written = open_checkpoint(folder)
    assert check_integrity(written).changed == ()
    assert [layer.name for layer in written.layers] == list(expected)
    updates, adapted = in_peft(folder, [f"layers.{i}.q" for i in range(4)], (24, 16))
    assert adapted == list(expected)
    for layer in written.layers:
        known = expected[layer.name]
        assert (layer.dtype, str(layer.shape)) == (known["dtype"], known["shape"])
        update = layer_product(layer).to_matrix()
        assert np.linalg.norm(update) == pytest.approx(known["norm"], rel=1e-13)
        assert update[:, :3].ravel()[:9] == pytest.approx(known["update"], abs=1e-11)
        assert updates[layer.name] == pytest.approx(update, abs=3e-6)


def test_an_old_directory_without_its_index_says_what_to_do(tmp_path):
    folder = tmp_path / "codes"
    shutil.copytree(INDEX_IN_CONFIG / "codes", folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    del config["layers"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="index of packed layers|holds no index") as error:
        open_checkpoint(folder)
    assert str(folder / "adapter_model.safetensors") in str(error.value)


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_beside_the_numbers_a_directory_takes_little(tmp_path, storage):
    """At most 4 kB and 16 bytes a layer, whatever their shapes and however many are left out."""
    tensors, layers, dropped, rng = {}, [], [], np.random.default_rng(0)
    for i in range(120):
        name = f"model.layers.{i // 4}.self_attn.{'qkvo'[i % 4]}_proj"
        tensors |= lora_pair(name, (64, 16, 16, 64)[i % 4], 64, 4, i)
        out = [(8, 8), (64, 1), (4, 4, 4)] if i % 4 in (0, 3) else [(4, 4), (16, 1), (2, 2, 4)]
        into = [(8, 8), (1, 64), (4, 4, 4)]
        kind = int(rng.integers(3))
        inner = (1, 1, 1)[: len(out[kind])] if rng.integers(2) else (2, 1, 2)[: len(out[kind])]
        terms = rng.integers(1, 5, 2)
        left = [
            rng.standard_normal((terms[0], m, r)) for m, r in zip(out[kind], inner, strict=True)
        ]
        right = [
            rng.standard_normal((terms[1], r, n)) for r, n in zip(inner, into[kind], strict=True)
        ]
        if rng.random() < 0.1:
            dropped.append(name)
        else:
            layers.append((name, left, right))
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    given = open_checkpoint(
        write_lora_directory(tmp_path / "a", tensors, r=4, target_modules=targets)
    )
    record = {"plan": CompressionPlan(ratio=6).to_json()}
    options = {"dropped": dropped, "provenance": record, "storage": storage}
    out = write_lsr(tmp_path / "o", source=given, layers=layers, **options)
    written = open_checkpoint(out)
    assert dropped
    assert len(written.layers) == len(layers)
    numbers = sum(tensor.nbytes for tensor in open_bundle(out).tensors.values())
    beside = sum(path.stat().st_size for path in out.iterdir()) - numbers
    report = 500  # compression.json, which `compress` adds
    assert beside + report <= 4096 + 16 * len(layers)
    check = verify(given, written)
    assert {layer.name for layer in check.layers if layer.relative_error == 1.0} == set(dropped)
    lora = export_lora(written, tmp_path / "lora")
    assert verify(given, open_checkpoint(lora)).source_matches
    # Layers that were left out are there too, as zeros: some servers want every layer of a type.
    exported = json.loads((lora / "adapter_config.json").read_text())
    assert exported["target_modules"] == sorted(targets)


def test_the_record_of_every_layer_is_kept_where_it_is_asked_for(tmp_path):
    given = source(tmp_path, "three-factors")
    result = compress(given, CompressionPlan(separation_rank=2))
    short, long = result.save(tmp_path / "short"), result.save(tmp_path / "long", record=True)
    assert "layers" not in json.loads((short / "compression.json").read_text())
    recorded = verify(given, open_checkpoint(long)).layers
    assert [layer.recorded_error for layer in recorded] == [
        layer.relative_error for layer in result.layers
    ]
    report = json.loads((short / "compression.json").read_text())
    assert verify(given, open_checkpoint(short)).recorded_error == result.totals.relative_error
    report["totals"]["relative_error"] *= 1.0 + 1e-6
    (short / "SHA256SUMS").unlink()
    (short / "compression.json").write_text(json.dumps(report))
    assert not verify(given, open_checkpoint(short)).passed
