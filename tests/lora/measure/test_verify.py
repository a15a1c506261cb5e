"""verify and export: right results pass, whatever became of a layer; damage does not."""

import json

import numpy as np
import pytest
from checkpoint_files import PREFIX, lora_pair, write_lora_directory
from console import run_command
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import lsrdecomp
from lsrdecomp import compress
from lsrdecomp.errors import CheckpointError
from lsrdecomp.lora.compress.export import export_lora
from lsrdecomp.lora.compress.truncate import truncate
from lsrdecomp.lora.files import open_checkpoint, write_lsr
from lsrdecomp.lora.files.tensors import data_sha256
from lsrdecomp.lora.measure.verify_files import LayerCheck, verify
from lsrdecomp.lora.search.plan import CompressionPlan, Search

QUICK = Search(orders=(2,), rounds=0, sweeps=4)


def test_a_dropped_layer_that_was_zero_is_as_recorded(tmp_path):
    tensors = {**lora_pair("layers.0.q", 16, 16), **lora_pair("layers.1.v", 16, 16, seed=1)}
    tensors |= {key: 0 * array for key, array in tensors.items() if "layers.1.v" in key}
    source = open_checkpoint(write_lora_directory(tmp_path / "a", tensors))
    written = open_checkpoint(compress(source, CompressionPlan(rtol=0.5)).save(tmp_path / "o"))
    assert [layer.name for layer in written.layers] == ["layers.0.q"]
    check = verify(source, written)
    assert [layer.relative_error for layer in check.layers if layer.name == "layers.1.v"] == [0.0]
    assert check.passed


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("seed", range(2))
def test_three_factors_are_recorded_as_a_reader_finds_them(tmp_path, storage, seed):
    tensors = {**lora_pair("q", 8, 12, 8, seed, "float32"), **lora_pair("v", 27, 8, 8, seed + 9)}
    source = open_checkpoint(write_lora_directory(tmp_path / "a", tensors, r=8))
    plan = CompressionPlan(separation_rank=3, inner_shape=(2, 2, 2), storage=storage)
    result = compress(source, plan)
    check = verify(source, open_checkpoint(result.save(tmp_path / "o")))
    assert [layer.relative_error for layer in check.layers] == pytest.approx(
        [layer.relative_error for layer in result.layers], rel=1e-13
    )
    assert check.passed


ROADS = {
    "ratio": lambda lora, storage: compress(lora, ratio=6, storage=storage, search=QUICK),
    "parameters": lambda lora, storage: compress(
        lora, parameters=300, storage=storage, search=QUICK
    ),
    "bytes": lambda lora, storage: compress(lora, bytes=1500, storage=storage, search=QUICK),
    "rtol": lambda lora, storage: compress(lora, rtol=0.6, storage=storage, search=QUICK),
    "terms": lambda lora, storage: compress(lora, separation_rank=2, storage=storage),
    "truncated": lambda lora, storage: truncate(lora, ratio=2, storage=storage),
}
FLOATS, INTEGERS = ("float32", "float16", "bfloat16"), ("int8", "int4")
STORAGES = {
    "ratio": (*FLOATS, *INTEGERS, "auto"),
    "terms": (*FLOATS, *INTEGERS),
    "truncated": FLOATS,  # a plain LoRA holds no integers
}
"""Of each road; the others differ from ``ratio`` only in what their goal counts."""


@pytest.mark.parametrize(
    ("road", "storage"),
    [
        (road, storage)
        for road in ROADS
        for storage in STORAGES.get(road, ("float16", "int4", "auto"))
    ],
)
def test_what_is_saved_passes_in_every_storage(tmp_path, road, storage):
    tensors = {**lora_pair("layers.0.q", 48, 32, 6), **lora_pair("layers.1.v", 32, 32, 6, seed=1)}
    source = open_checkpoint(write_lora_directory(tmp_path / "lora", tensors, r=6, lora_alpha=6))
    made = ROADS[road](source, storage)
    written = open_checkpoint(made.save(tmp_path / "small"))
    check = verify(source, written)
    assert check.passed
    assert check.recorded_error == pytest.approx(check.relative_error, rel=1e-2)
    if road != "truncated":
        assert written.adapter_parameters == made.totals.parameters
        assert {layer.name: layer.dtype for layer in written.layers} == {
            row.name: row.storage for row in made.layers if row.structure != "drop"
        }
    exported = open_checkpoint(export_lora(written, tmp_path / "lora again", storage="bfloat16"))
    assert verify(source, exported).passed


def test_source_and_written_the_wrong_way_round_are_told(tmp_path):
    source = open_checkpoint(write_lora_directory(tmp_path / "lora"))
    small = open_checkpoint(
        compress(source, separation_rank=1, inner_shape=(2, 1)).save(tmp_path / "small")
    )
    with pytest.raises(CheckpointError, match="small: is an LSR adapter: name first the LoRA"):
        verify(small, source)


@given(st.sampled_from([float("nan"), float("inf")]), st.sampled_from([None, 0.25, float("nan")]))
def test_an_error_that_is_no_number_never_agrees(error, recorded):
    assert not LayerCheck("q", 1, 1.0, error, recorded).agrees


def test_numbers_beyond_double_precision_fail_by_name(tmp_path):
    tensors = {key: array.astype(np.float64) for key, array in lora_pair("q").items()}
    sane = open_checkpoint(write_lora_directory(tmp_path / "sane", tensors))
    huge = write_lora_directory(
        tmp_path / "huge", {key: array * 1e160 for key, array in tensors.items()}
    )
    with pytest.raises(CheckpointError, match="q: .*squares overflow"):
        verify(open_checkpoint(huge), open_checkpoint(huge))
    factors = [np.full((1, 4, 2), 1e155), np.full((1, 2, 6), 1e155)]
    written = write_lsr(
        tmp_path / "o", source=sane, layers=[("q", factors[:1], factors[1:])], storage="float64"
    )
    with np.errstate(over="ignore", invalid="ignore"):
        assert not verify(sane, open_checkpoint(written)).passed


@pytest.mark.parametrize("verb", ["inspect", "curve", "compress", "verify"])
@pytest.mark.parametrize("kind", ["alpha", "numbers", "zero"])
def test_extreme_adapters_are_one_line_for_every_verb(tmp_path, verb, kind):
    tensors = {key: array.astype(np.float64) for key, array in lora_pair("q").items()}
    if kind != "alpha":
        tensors = {
            key: array * (1e160 if kind == "numbers" else 0.0) for key, array in tensors.items()
        }
    source = write_lora_directory(
        tmp_path / "a", tensors, **({"lora_alpha": 1e300} if kind == "alpha" else {})
    )
    arguments = {"compress": ("--out", tmp_path / "o", "--ratio", 2), "verify": (source,)}.get(
        verb, ()
    )
    done = run_command(verb, source, *arguments)
    if kind == "zero" and verb != "curve":
        assert (done.returncode, done.stderr) == (0, "")
        assert verb != "compress" or "Every layer is zero, and is written as zeros" in done.stdout
        return
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert ("squares overflow" in done.stderr) == (kind != "zero")
    assert kind == "zero" or ": q: " in done.stderr
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("to", ["lora", "kohya"])
def test_a_changed_file_is_not_exported(tmp_path, to):
    tensors = {**lora_pair("lora_unet_q", 16, 16), **lora_pair("lora_unet_v", 16, 16, seed=1)}
    source = open_checkpoint(write_lora_directory(tmp_path / "a", tensors))
    out = compress(source, CompressionPlan(separation_rank=1, storage="int4")).save(tmp_path / "o")
    target = tmp_path / ("lora" if to == "lora" else "lora.safetensors")
    weights = out / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 0x40
    weights.write_bytes(content)
    with pytest.raises(
        CheckpointError, match="adapter_model.safetensors changed since it was written"
    ):
        export_lora(open_checkpoint(out), target, to=to)
    assert not target.exists()
    content[-1] ^= 0x40
    weights.write_bytes(content)
    assert export_lora(open_checkpoint(out), target, to=to) == target


def test_a_head_that_the_config_declares_and_the_file_lacks_is_named(tmp_path):
    head = {f"{PREFIX}classifier.weight": np.ones((2, 4), np.float32)}
    source = write_lora_directory(
        tmp_path / "a", {**lora_pair("q"), **head}, modules_to_save=["classifier"]
    )
    assert open_checkpoint(source).notes == ()
    weights = source / "adapter_model.safetensors"
    save_file(
        {key: array for key, array in load_file(weights).items() if "classifier" not in key},
        weights,
    )
    done = run_command("inspect", source)
    assert "modules_to_save names 'classifier', of which the file holds no tensor" in done.stdout


def test_the_two_heads_that_peft_names_are_one(tmp_path):
    head = {f"{PREFIX}classifier.weight": np.ones((2, 4), np.float32)}
    # A pair more each time that PEFT opens a classifier.
    named = [
        "classifier",
        "score",
        "classifier",
        "score",
    ]
    source = write_lora_directory(tmp_path / "a", {**lora_pair("q"), **head}, modules_to_save=named)
    assert open_checkpoint(source).notes == ()
    small = compress(open_checkpoint(source), CompressionPlan(separation_rank=1)).save(
        tmp_path / "small"
    )
    assert open_checkpoint(small).config["modules_to_save"] == ["classifier", "score"]
    source = write_lora_directory(tmp_path / "b", lora_pair("q"), modules_to_save=named)
    assert "names 'classifier', 'score', of which" in open_checkpoint(source).notes[0]


@pytest.fixture(scope="module")
def unet(tmp_path_factory):
    """A diffusers LoRA in float16, its LSR form saved beside it; not to be changed."""
    folder = tmp_path_factory.mktemp("unet")
    rng = np.random.default_rng(3)
    names = [f"unet.down_blocks.{i}.attentions.0.transformer_blocks.0.attn1.to_q" for i in range(3)]
    shapes = {".lora_A.weight": (4, 48), ".lora_B.weight": (48, 4)}
    tensors = {
        n + key: rng.standard_normal(shape).astype(np.float16)
        for n in names
        for key, shape in shapes.items()
    }
    save_file(tensors, folder / "style.safetensors")
    source = open_checkpoint(folder / "style.safetensors")
    return source, open_checkpoint(
        compress(source, CompressionPlan(ratio=2)).save(folder / "small")
    )


def tamper(path, change, pick=lambda key: True):
    """Other numbers in a file, under the header that it has."""
    metadata = dict(open_checkpoint(path).metadata)
    tensors = {key: change(array) if pick(key) else array for key, array in load_file(path).items()}
    save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize("to", ["same", "diffusers", "kohya"])
@pytest.mark.parametrize("storage", [None, "float16", "bfloat16"])
def test_an_export_passes_in_any_type_and_under_other_names_and_fails_once_changed(
    tmp_path, unet, to, storage
):
    source, small = unet
    for number, adapter in enumerate((small, source)):
        out = export_lora(
            adapter, tmp_path / f"{number}.safetensors", to=to, like=source, storage=storage
        )
        check = verify(source, open_checkpoint(out))
        assert (check.passed, check.recorded) == (True, True)
        tamper(
            out,
            lambda array: 3 * array,
            lambda key: key.endswith(("lora_B.weight", "lora_up.weight")),
        )
        assert not verify(source, open_checkpoint(out)).passed


def test_an_export_is_held_to_the_recorded_error_where_its_digest_was_made_anew(tmp_path, unet):
    source, small = unet
    out = export_lora(small, tmp_path / "o.safetensors", to="same", like=source)
    metadata, tensors = dict(open_checkpoint(out).metadata), load_file(out)
    del metadata["lsr"]
    tensors = {key: 3 * array if "lora_B" in key else array for key, array in tensors.items()}
    save_file(tensors, out, metadata=metadata)
    record = json.loads(metadata["lsrdecomp"]) | {"sha256": data_sha256(out)}
    save_file(tensors, out, metadata=metadata | {"lsrdecomp": json.dumps(record)})
    check = verify(source, open_checkpoint(out))
    assert not check.changed_files
    assert not check.agrees


@pytest.mark.parametrize("profile", ["peft", "common"])
def test_heads_left_out_on_purpose_are_no_fault_of_an_export(tmp_path, profile):
    head = {f"{PREFIX}classifier.weight": np.ones((2, 4), np.float32)}
    source = open_checkpoint(
        write_lora_directory(
            tmp_path / "a", {**lora_pair("q", 16, 16), **lora_pair("v", 16, 16, seed=2), **head}
        )
    )
    small = open_checkpoint(
        compress(source, CompressionPlan(separation_rank=1)).save(tmp_path / "small")
    )
    out = export_lora(small, tmp_path / "o", profile=profile, without_heads=True)
    assert verify(source, open_checkpoint(out)).passed
    (out / "SHA256SUMS").unlink()
    tamper(
        out / "adapter_model.safetensors", np.ones_like, lambda key: key.endswith("lora_B.weight")
    )
    assert not verify(source, open_checkpoint(out)).passed


def test_a_record_that_names_no_file_vouches_for_none_and_without_any_the_exit_code_is_three(
    tmp_path,
):
    folder = write_lora_directory(tmp_path / "a")
    source = open_checkpoint(folder)
    out = export_lora(source, tmp_path / "o")
    (out / "SHA256SUMS").write_text("")
    assert (
        "adapter_model.safetensors (not in SHA256SUMS)"
        in verify(source, open_checkpoint(out)).changed_files
    )
    tensors = {
        key: 1.5 * array for key, array in load_file(folder / "adapter_model.safetensors").items()
    }
    other = write_lora_directory(tmp_path / "b", tensors)
    assert (
        run_command("verify", folder, out).returncode,
        run_command("verify", folder, other).returncode,
    ) == (
        1,
        3,
    )
    assert "has no record of what was written" in run_command("verify", folder, other).stderr


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_source_in_half_precision_is_written_so_unless_another_type_is_asked_for(tmp_path, dtype):
    folder = write_lora_directory(
        tmp_path / "a",
        {**lora_pair("q", 64, 64, 2, dtype=dtype), **lora_pair("v", 64, 64, 2, 1, dtype=dtype)},
    )
    for options, wanted in (((), dtype), (("--storage", "float32"), "float32")):
        out = tmp_path / f"o{len(options)}"
        done = run_command("compress", folder, "--separation-rank", 1, "--out", out, *options)
        assert done.returncode == 0, done.stderr
        assert {layer.dtype for layer in open_checkpoint(out).layers} == {wanted}
    assert lsrdecomp.compress(folder, separation_rank=1).plan.storage == dtype


def test_the_record_of_every_layer_is_kept_where_it_is_asked_for(tmp_path):
    tensors = {**lora_pair("layers.0.q", 27, 16, 8), **lora_pair("layers.1.q", 27, 16, 8, 1)}
    given = open_checkpoint(write_lora_directory(tmp_path / "a", tensors, r=8))
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


HADAMARD = {
    f"hada_w{k}_{side}": shape for k in "12" for side, shape in (("a", (12, 2)), ("b", (2, 8)))
}
METHODS = {
    "LoHa": HADAMARD,
    "LoKr, whole": {"lokr_w1": (4, 2), "lokr_w2": (3, 4)},
    "LoKr, low rank": {"lokr_w1": (4, 2), "lokr_w2_a": (3, 2), "lokr_w2_b": (2, 4)},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("storage", ["float32", "float16"])
def test_what_is_exported_of_other_methods_is_the_same_and_verified(tmp_path, method, storage):
    rng = np.random.default_rng(3)
    tensors = {
        f"lora_unet_{block}.{part}": rng.standard_normal(shape).astype(np.float32)
        for block in "ab"
        for part, shape in METHODS[method].items()
    }
    source = tmp_path / "source.safetensors"
    save_file(tensors, source)
    written = export_lora(open_checkpoint(source), tmp_path / "lora", storage=storage)
    check = verify(open_checkpoint(source), open_checkpoint(written))
    assert check.passed
    assert check.relative_error < {"float32": 1e-6, "float16": 2e-3}[storage]
    assert all(layer.norm > 1.0 for layer in check.layers)
    done = run_command("verify", source, written)
    assert done.returncode == 0, done.stderr
    # Other numbers are another adapter
    tensors[next(iter(tensors))] *= 2
    save_file(tensors, source)
    other = verify(open_checkpoint(source), open_checkpoint(written))
    assert other.source_matches is False
    assert other.relative_error > 0.1
    assert not other.passed


@pytest.mark.parametrize("places", [("dir", "dir"), ("lora", "dir"), ("dir", "lora")])
def test_places_that_are_not_there_are_named(places, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lora_directory(tmp_path / "lora")
    with pytest.raises(CheckpointError, match="^dir: no such file or directory$"):
        verify(*places)


def test_paths_are_opened(tmp_path):
    place = write_lora_directory(tmp_path / "lora")
    assert verify(place, str(place)).relative_error < 1e-15
