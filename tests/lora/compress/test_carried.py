"""A cut in the source's own format takes pairs, and copies every other tensor byte for byte."""

import json
import re

import numpy as np
import pytest
from checkpoint_files import PREFIX, lora_pair, write_lora_directory
from console import run_command
from safetensors.numpy import load_file, save_file

from lsrdecomp import compress
from lsrdecomp.errors import BudgetError, UnsupportedError
from lsrdecomp.fields import SettingsError
from lsrdecomp.lora.compress import export_lora, truncate
from lsrdecomp.lora.files import open_checkpoint, write_lora, write_lsr, write_pairs
from lsrdecomp.lora.measure import verify
from lsrdecomp.lora.search import CompressionPlan

NAMES = [
    f"diffusion_model.blocks.{i}.{part}" for i in range(3) for part in ("self_attn.q", "ffn.0")
]
"""Layers of Wan as ComfyUI names them."""


def normal(*shape, seed=0, dtype=np.float16):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def kohya_pair(name, seed=0, rank=8):
    """A pair of falling spectrum under kohya's keys."""
    return {
        f"{name}.lora_down.weight": normal(rank, 40, seed=seed),
        f"{name}.lora_up.weight": (normal(48, rank, seed=seed + 1) * 0.6 ** np.arange(rank)).astype(
            np.float16
        ),
        f"{name}.alpha": np.array(4.0, np.float16),
    }


def wan(path, more=None):
    """A file of pairs, with other tensors."""
    tensors = {}
    for seed, name in enumerate(NAMES):
        tensors |= kohya_pair(name, seed)
    save_file(tensors | (more or {}), path)
    return path


BESIDE = {
    "Wan's differences": {
        "diffusion_model.blocks.0.norm3.diff": normal(48),
        f"{NAMES[0]}.diff_b": normal(48),
        "diffusion_model.head.head.diff": normal(4, 48),
    },
    "norms of LyCORIS": {"norm1.w_norm": normal(48), "norm1.b_norm": normal(48)},
    "OFT with its alpha": {"x.oft_blocks": normal(2, 4, 4), "x.alpha": normal(1)},
    "DoRA of another layer": {
        **kohya_pair("diffusion_model.patch", 9),
        "diffusion_model.patch.dora_scale": normal(48, 1),
    },
    "a part that is not known": {
        **kohya_pair("diffusion_model.patch", 9),
        "diffusion_model.patch.scalar": normal(1),
    },
    "LoKr of another layer": {
        "lora_unet_x.lokr_w1": normal(4, 4),
        "lora_unet_x.lokr_w2": normal(6, 5),
        "lora_unet_x.alpha": np.array(1.0, np.float16),
    },
    "LoHa of another layer": {
        f"lora_unet_x.hada_w{i}_{side}": normal(*shape)
        for i in (1, 2)
        for side, shape in (("a", (9, 2)), ("b", (2, 7)))
    },
    "LoKr with DoRA": {
        "lora_unet_x.lokr_w1": normal(4, 4),
        "lora_unet_x.lokr_w2": normal(6, 5),
        "lora_unet_x.dora_scale": normal(24, 1),
    },
}
"""Tensors beside the pairs, none of which is cut."""


@pytest.mark.parametrize("kind", BESIDE)
def test_what_is_no_pair_is_copied_byte_for_byte_and_verified(tmp_path, kind):
    more = BESIDE[kind]
    source = open_checkpoint(wan(tmp_path / "style.safetensors", more), carry=True)
    cut = truncate(source, ratio=3)
    assert set(cut.carried) == set(more)
    file = cut.save(tmp_path / "small.safetensors")
    written = load_file(file)
    for key, array in more.items():
        assert written[key].dtype == array.dtype
        assert written[key].tobytes() == array.tobytes()
    assert {key for key in written if not key.startswith("diffusion")} <= more.keys()
    check = verify(source, open_checkpoint(file, carry=True))
    assert check.passed
    assert check.recorded_error == pytest.approx(check.relative_error, rel=1e-9)
    # Another value of a carried tensor is found.
    key = next(iter(more))
    made = open_checkpoint(file, carry=True)
    changed = written | {key: written[key] + np.float16(1)}
    record = {name: text for name, text in made.metadata.items() if name != "lsr"}
    save_file(changed, tmp_path / "other.safetensors", metadata=record)
    other = verify(source, open_checkpoint(tmp_path / "other.safetensors", carry=True))
    assert other.changed_tensors == ((key,) if key in made.carried else ())
    assert other.changed_tensors or not other.agrees


def test_the_command_counts_what_it_carries_and_verifies_it(tmp_path):
    wan(tmp_path / "style.safetensors", BESIDE["Wan's differences"])
    out = ("--ratio", 3, "--out", "small.safetensors")
    done = run_command("compress", "style.safetensors", *out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "3 tensors that are no pair are carried along, 576 bytes" in text
    assert "diffusion_model.head.head.diff" in text
    done = run_command("verify", "style.safetensors", "small.safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["Wan's differences", "DoRA of another layer"])
def test_what_makes_another_format_refuses_what_is_no_pair_by_name(tmp_path, kind):
    file = wan(tmp_path / "style.safetensors", BESIDE[kind])
    with pytest.raises(UnsupportedError, match=r"(diff|dora_scale).*: .*compress --to same"):
        open_checkpoint(file)
    for command in (
        ("compress", file, "--ratio", 3, "--out", tmp_path / "small"),
        ("export", file, "--out", tmp_path / "small"),
        ("export", file, "--to", "diffusers", "--out", tmp_path / "small.safetensors"),
    ):
        done = run_command(*command)
        assert done.returncode == 2
        assert "only a cut in the file's own format keeps it" in " ".join(done.stderr.split())
    assert [path.name for path in tmp_path.iterdir()] == ["style.safetensors"]


def test_no_writer_of_another_format_drops_what_is_no_pair(tmp_path):
    file = wan(tmp_path / "style.safetensors", BESIDE["Wan's differences"])
    source = open_checkpoint(file, carry=True)
    pairs = [(layer.name, *layer.load()) for layer in source.layers]
    for write in (
        lambda out: write_lora(out, source=source, layers=pairs),
        lambda out: write_lsr(out, source=source, layers=[], storage="float32"),
        lambda out: write_pairs(f"{out}.safetensors", source=source, layers=pairs, names="kohya"),
        lambda out: export_lora(source, out),
        lambda _: compress(source, ratio=2),
    ):
        with pytest.raises(UnsupportedError, match="only a cut in the file's own format keeps it"):
            write(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["style.safetensors"]


def test_a_layer_whose_scale_is_in_a_config_that_is_written_anew_is_not_carried(tmp_path):
    tensors = {
        "unet.x.lora_A.weight": normal(4, 20),
        "unet.x.lora_B.weight": normal(24, 4),
        "unet.y.lora_A.weight": normal(4, 20),
        "unet.y.lora_B.weight": normal(24, 4),
        "unet.y.scalar": normal(1),
    }
    header = {"unet.r": 4, "unet.lora_alpha": 8}
    metadata = {"lora_adapter_metadata": json.dumps(header)}
    save_file(tensors, tmp_path / "style.safetensors", metadata=metadata)
    with pytest.raises(UnsupportedError, match="what it does to the update is not"):
        open_checkpoint(tmp_path / "style.safetensors", carry=True)
    del tensors["unet.y.scalar"]
    tensors["unet.y.diff_b"] = normal(24)
    save_file(tensors, tmp_path / "style.safetensors", metadata=metadata)
    source = open_checkpoint(tmp_path / "style.safetensors", carry=True)
    file = truncate(source, ratio=2).save(tmp_path / "small.safetensors")
    assert verify(source, open_checkpoint(file, carry=True)).passed


def test_a_file_of_other_methods_alone_is_refused_as_before(tmp_path):
    save_file({"x.dora_scale": normal(4, 1), **kohya_pair("x")}, tmp_path / "all.safetensors")
    with pytest.raises(UnsupportedError, match="DoRA rescales every row.*merge it into its base"):
        open_checkpoint(tmp_path / "all.safetensors", carry=True)


def test_alphas_without_a_pair_are_dropped_and_said(tmp_path):
    orphans = {f"lora_te2_{i}.alpha": np.array(4.0, np.float16) for i in range(3)}
    source = open_checkpoint(wan(tmp_path / "style.safetensors", orphans))
    note = "3 alphas without a pair are left out, the first lora_te2_0.alpha"
    assert note in source.notes
    assert len(source.layers) == len(NAMES)
    file = truncate(source, ratio=3).save(tmp_path / "small.safetensors")
    assert not orphans.keys() & load_file(file).keys()
    assert verify(source, open_checkpoint(file)).passed
    out = ("--ratio", 3, "--out", tmp_path / "again.safetensors")
    done = run_command("compress", tmp_path / "style.safetensors", *out)
    assert f"Note: {note}." in " ".join(done.stdout.split())
    assert compress(source, ratio=3).save(tmp_path / "lsr").is_dir()


# -- layers by name --------------------------------------------------------------------------------


def test_only_cuts_layers_that_match_and_copies_the_others(tmp_path):
    file = wan(tmp_path / "style.safetensors", BESIDE["Wan's differences"])
    source = open_checkpoint(file, carry=True)
    cut = truncate(source, ratio=4, only=["*.ffn.0"])
    assert {layer.name for layer in cut.layers} == set(NAMES[1::2])
    assert cut.parameters <= sum(layer.parameters for layer in cut.layers) / 4
    written = load_file(cut.save(tmp_path / "small.safetensors"))
    before = load_file(file)
    for key, array in before.items():
        if "ffn" not in key:
            assert written[key].tobytes() == array.tobytes()
    made = open_checkpoint(tmp_path / "small.safetensors", carry=True)
    check = verify(source, made)
    assert check.passed
    errors = {layer.name: layer.relative_error for layer in check.layers}
    assert max(errors[name] for name in NAMES[::2]) < 1e-12 < min(errors[n] for n in NAMES[1::2])
    assert check.recorded_error == pytest.approx(check.relative_error, rel=1e-9)
    done = run_command(
        *("compress", file, "--ratio", 4, "--only", "*.ffn.0", "--only", "*.2.self_attn.*"),
        *("--out", tmp_path / "again.safetensors"),
    )
    text = " ".join(done.stdout.split())
    assert "2 layers are copied as they are, the first diffusion_model.blocks.0.self_attn.q" in text
    assert "over the layers that were cut" in text


def write_peft(folder, **config):
    tensors = {}
    for seed, name in enumerate(("a.q_proj", "a.v_proj", "b.q_proj")):
        rank = 6 if name == "a.v_proj" else 4
        tensors |= lora_pair(name, m=24, n=20, r=rank, seed=seed)
    rest = {"rank_pattern": {"v_proj": 6}, "alpha_pattern": {"a.q_proj": 7.5}, "lora_alpha": 12}
    return write_lora_directory(folder, tensors, r=4, **{**rest, **config})


@pytest.mark.parametrize("use_rslora", [False, True])
def test_only_keeps_the_scale_of_layers_of_peft(tmp_path, use_rslora):
    source = open_checkpoint(write_peft(tmp_path / "lora", use_rslora=use_rslora))
    cut = truncate(source, ratio=2, only=("b.*",))
    made = open_checkpoint(cut.save(tmp_path / "small"))
    before, after = (load_file(adapter.weights) for adapter in (source, made))
    for name in ("a.q_proj", "a.v_proj"):
        for half in "AB":
            key = f"{PREFIX}{name}.lora_{half}.weight"
            assert after[key].tobytes() == before[key].tobytes()
        assert made.layer(name).scale == pytest.approx(source.layer(name).scale, rel=1e-15)
    assert made.layer("b.q_proj").rank == 2
    assert verify(source, made).passed


def test_only_keeps_the_scale_of_layers_in_the_header_of_diffusers(tmp_path):
    tensors = {}
    for i in range(2):
        name = f"unet.blocks.{i}.to_q"
        tensors[f"{name}.lora_A.weight"] = normal(4, 20, seed=i)
        tensors[f"{name}.lora_B.weight"] = normal(24, 4, seed=9 + i)
    header = {"unet.r": 4, "unet.lora_alpha": 8, "unet.alpha_pattern": {"blocks.0.to_q": 6}}
    metadata = {"lora_adapter_metadata": json.dumps(header)}
    save_file(tensors, tmp_path / "style.safetensors", metadata=metadata)
    source = open_checkpoint(tmp_path / "style.safetensors")
    assert [layer.scale for layer in source.layers] == [1.5, 2.0]
    file = truncate(source, ratio=2, only=["*.1.*"]).save(tmp_path / "small.safetensors")
    made = open_checkpoint(file)
    assert [(layer.rank, layer.scale) for layer in made.layers] == [(4, 1.5), (2, 1.0)]
    assert verify(source, made).passed


def test_only_of_a_stack_of_experts_takes_the_whole_stack(tmp_path):
    tensors = {
        f"{PREFIX}mlp.experts.lora_A.weight": normal(12, 20, dtype=np.float32),
        f"{PREFIX}mlp.experts.lora_B.weight": normal(24, 12, seed=1, dtype=np.float32),
        **lora_pair("q_proj", m=24, n=20, r=4),
    }
    config = {"target_parameters": ["mlp.experts.down_proj"], "target_modules": ["q_proj"]}
    folder = write_lora_directory(tmp_path / "lora", tensors, r=4, lora_alpha=12, **config)
    source = open_checkpoint(folder)
    made = open_checkpoint(truncate(source, ratio=2, only=["q_proj"]).save(tmp_path / "small"))
    assert {layer.name: layer.rank for layer in made.layers} == {
        **{f"mlp.experts.down_proj.{i}": 4 for i in range(3)},
        "q_proj": 2,
    }
    assert verify(source, made).passed
    with pytest.raises(UnsupportedError, match="stack of experts, which is cut as a whole"):
        truncate(source, ratio=2, only=["*.down_proj.1"])
    made = truncate(source, ratio=2, only=["*.down_proj.*"]).save(tmp_path / "stack")
    assert verify(source, open_checkpoint(made)).passed


@pytest.mark.parametrize(
    ("pattern", "numbers"),
    [
        ("*", range(6)),
        ("q", (0, 2, 4)),
        ("*attn*", (0, 2, 4)),
        ("ffn.0", (1, 3, 5)),
        ("blocks.1.*", (2, 3)),
        ("diffusion_model.blocks.[02].ffn.0", (1, 5)),
    ],
)
def test_a_pattern_matches_a_name_or_its_end_from_a_dot_on(tmp_path, pattern, numbers):
    source = open_checkpoint(wan(tmp_path / "style.safetensors"))
    cut = truncate(source, rtol=0.3, only=[pattern])
    assert {layer.name for layer in cut.layers} == {NAMES[i] for i in numbers}
    for other in ("locks.1.*", "0.ffn", "Q"):
        with pytest.raises(BudgetError, match="matches none of 6 layers"):
            truncate(source, rtol=0.3, only=[other])


def test_a_pattern_without_a_layer_is_refused_with_examples(tmp_path):
    file = wan(tmp_path / "style.safetensors")
    with pytest.raises(BudgetError, match=rf"only='text_\*' matches none of 6 .*{NAMES[1]}"):
        truncate(open_checkpoint(file), ratio=2, only=["*", "text_*"])
    with pytest.raises(BudgetError, match="only must be a list"):
        truncate(open_checkpoint(file), ratio=2, only="*")


def test_only_is_refused_where_it_is_not_read(tmp_path):
    words = "^only is read with lsrdecomp.lora.compress.truncate"
    with pytest.raises(SettingsError, match=words):
        compress(wan(tmp_path / "style.safetensors"), CompressionPlan(ratio=2, only=["*"]))
    command = ("compress", tmp_path / "style.safetensors", "--only", "*.ffn.*", "--ratio", 2)
    done = run_command(*command, "--out", tmp_path / "small")
    assert "--only is read with --to same" in " ".join(done.stderr.split())


def test_one_rank_for_all_layers_is_no_rank_for_some(tmp_path):
    tensors = {}
    for name in "qk":
        tensors |= {f"{name}.lora_A": normal(4, 20), f"{name}.lora_B": normal(24, 4, seed=1)}
    save_file(tensors, tmp_path / "style.safetensors")
    source = open_checkpoint(tmp_path / "style.safetensors", alpha=8)
    with pytest.raises(UnsupportedError, match="k: is not matched by only, .*export --to lora"):
        truncate(source, ratio=2, only=["q"])


# -- what is told ----------------------------------------------------------------------------------


def test_an_overflow_names_file_layer_and_a_storage_that_holds_it(tmp_path):
    pair = {
        "x.lora_down.weight": normal(4, 20, dtype=np.float32) * np.float32(1e6),
        "x.lora_up.weight": normal(24, 4, dtype=np.float32) * np.float32(1e6),
    }
    save_file(pair, tmp_path / "style.safetensors")
    command = ("compress", "style.safetensors", "--ratio", 2, "--out", "small.safetensors")
    done = run_command(*command, "--storage", "float16", cwd=tmp_path)
    assert done.returncode == 2
    text = " ".join(done.stderr.split())
    assert "style.safetensors: x: its largest entry " in text
    assert "does not fit float16; store as bfloat16 or float32 (--storage bfloat16)" in text
    assert [path.name for path in tmp_path.iterdir()] == ["style.safetensors"]
    done = run_command(*command, "--storage", "bfloat16", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_share_of_tied_heads_is_told(tmp_path):
    heads = normal(500, 24, dtype=np.float32)
    tensors = lora_pair("q_proj", m=24, n=20, r=8)
    for name in ("embed_tokens", "lm_head"):
        tensors[f"{PREFIX}{name}.weight"] = heads
    folder = write_lora_directory(tmp_path / "lora", tensors, r=8)
    done = run_command("compress", folder, "--ratio", 4, "--to", "same", "--out", tmp_path / "s")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "2 tensors that are no pair are carried along, 96,000 bytes (98% of the source)" in text
    assert f"{PREFIX}lm_head.weight equals {PREFIX}embed_tokens.weight; both are stored" in text
    done = run_command("compress", folder, "--ratio", 4, "--out", tmp_path / "lsr")
    text = " ".join(done.stdout.split())
    found = re.search(r"add 96,000 bytes to both: ([\d,]+) instead of ([\d,]+)\.", text)
    assert all(int(number.replace(",", "")) > 96_000 for number in found.groups())
    made = load_file(tmp_path / "s" / "adapter_model.safetensors")
    assert all(
        (made[f"{PREFIX}{name}.weight"] == heads).all() for name in ("embed_tokens", "lm_head")
    )


def test_endless_brackets_in_a_config_are_one_clear_error(tmp_path):
    file = wan(tmp_path / "style.safetensors")
    for ending in (".toml", ".json"):
        config = tmp_path / f"run{ending}"
        config.write_text("[compress]\nratio = " * (ending == ".toml") + "[" * 20_000)
        done = run_command("compress", file, "--config", config, "--out", tmp_path / "small")
        assert done.returncode == 2
        assert "nested too deeply" in " ".join(done.stderr.split())
        assert "Traceback" not in done.stderr


def test_the_next_step_of_a_file_with_loha_beside_pairs_runs(tmp_path):
    wan(tmp_path / "style.safetensors", BESIDE["LoHa of another layer"])
    done = run_command(
        *("compress", "style.safetensors", "--separation-rank", 2, "--out", "small"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "export small --to kohya --out small.safetensors" in " ".join(done.stdout.split())


def test_export_in_the_same_format_carries_too(tmp_path):
    more = BESIDE["Wan's differences"]
    file = wan(tmp_path / "style.safetensors", more)
    out = tmp_path / "same.safetensors"
    done = run_command("export", file, "--to", "same", "--out", out)
    assert done.returncode == 0, done.stderr
    assert load_file(out)[f"{NAMES[0]}.diff_b"].tobytes() == more[f"{NAMES[0]}.diff_b"].tobytes()
