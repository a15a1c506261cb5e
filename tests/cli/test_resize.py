"""compress to a LoRA file as it came: one file, several sizes, directories, and a dry run."""

import json

import numpy as np
import pytest
from checkpoint_files import write_lora_directory
from console import run_command
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from lsrdecomp import compress
from lsrdecomp.errors import BudgetError, LsrError
from lsrdecomp.lora.compress import truncate
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.measure import verify
from lsrdecomp.lora.search import CompressionPlan

NAMES = [f"diffusion_model.blocks.{i}.self_attn.q" for i in range(5)]


def put(path, seed=0, dtype=np.float16):
    """Five layers of unequal size and decay, and a convolution, each with an alpha."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for i, name in enumerate(NAMES):
        tensors[f"{name}.lora_down.weight"] = rng.standard_normal((8, 40 * 3 ** min(i, 2))).astype(
            dtype
        )
        tensors[f"{name}.lora_up.weight"] = (
            rng.standard_normal((64, 8)) * (0.3 + 0.15 * i) ** np.arange(8)
        ).astype(dtype)
        tensors[f"{name}.alpha"] = np.array(4.0, dtype)
    tensors["conv.lora_down.weight"] = rng.standard_normal((8, 16, 3, 3)).astype(dtype)
    tensors["conv.lora_up.weight"] = rng.standard_normal((32, 8, 1, 1)).astype(dtype)
    tensors["conv.alpha"] = np.array(8.0, dtype)
    save_file(
        tensors, path, metadata={"ss_network_module": "networks.lora", "sshs_model_hash": "0"}
    )
    return path


def formed(layer):
    """ΔW."""
    left, right = layer.load()
    return layer.scale * (left.astype(np.float64) @ right.astype(np.float64))


@pytest.mark.parametrize("ratio", [1.5, 3, 7])
def test_no_other_ranks_of_truncated_svd_are_nearer_at_the_size(tmp_path, ratio):
    source = open_checkpoint(put(tmp_path / "style.safetensors", dtype=np.float32))
    cut = truncate(source, ratio=ratio)
    assert cut.parameters <= source.adapter_parameters / ratio
    back = {
        layer.name: layer
        for layer in open_checkpoint(cut.save(tmp_path / "small.safetensors")).layers
    }
    lost, every_loss, every_size = 0.0, np.zeros(1), np.zeros(1)
    for layer, rank in zip(source.layers, cut.ranks, strict=True):
        sigma = np.linalg.svd(formed(layer), compute_uv=False)[:8]
        made = formed(back[layer.name]) if rank else 0.0
        np.testing.assert_allclose(
            np.linalg.norm(formed(layer) - made) ** 2, np.sum(sigma[rank:] ** 2), rtol=1e-4
        )
        lost += np.sum(sigma[rank:] ** 2)
        # All ranks of this layer beside all of those before.
        tails = np.array([np.sum(sigma[rank:] ** 2) for rank in range(9)])
        every_loss = (every_loss[:, None] + tails).ravel()
        every_size = (every_size[:, None] + sum(layer.shape) * np.arange(9)).ravel()
    best = np.min(every_loss[every_size <= source.adapter_parameters / ratio])
    assert lost <= 1.05 * best  # one threshold leaves room at the end that other ranks might use
    size = sum(np.linalg.norm(formed(layer)) ** 2 for layer in source.layers)
    assert cut.relative_error == pytest.approx(np.sqrt(lost / size), rel=1e-6)


def test_a_file_comes_back_as_it_came_and_verify_finds_its_error(tmp_path):
    put(tmp_path / "style.safetensors")
    done = run_command(
        "compress",
        "style.safetensors",
        "--ratio",
        2,
        "--out",
        "small.safetensors",
        "--json",
        "-",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    before, after = (
        open_checkpoint(tmp_path / f"{name}.safetensors") for name in ("style", "small")
    )
    stored, made = load_file(before.weights), load_file(after.weights)
    assert made.keys() <= stored.keys()
    assert {array.dtype.name for array in made.values()} == {"float16"}
    assert all(made[key] == stored[key] for key in made if key.endswith("alpha"))
    assert after.metadata["ss_network_module"] == "networks.lora"
    assert after.metadata["sshs_model_hash"] == json.loads(after.metadata["lsrdecomp"])["sha256"]
    check = verify(before, after)
    assert check.passed
    assert check.relative_error == pytest.approx(facts["relative_error"], rel=1e-9)
    assert (
        run_command("verify", "style.safetensors", "small.safetensors", cwd=tmp_path).returncode
        == 0
    )


def test_weight_files_that_a_directory_leaves_out_are_named(tmp_path):
    folder = tmp_path / "styles"
    folder.mkdir()
    for name in "ab":
        put(folder / f"{name}.safetensors")
    command = ("compress", folder, "--ratio", "3", "--out", tmp_path / "small")
    for name in ("ink.pt", "old.npz", ".hidden.pt", "notes.txt"):
        (folder / name).write_bytes(b"anything")
    done = run_command(*command)
    assert done.returncode == 0, done.stderr
    assert f"Of {folder} only .safetensors files are taken together" in done.stderr
    assert "left out: ink.pt, old.npz." in done.stderr
    assert sorted(file.name for file in (tmp_path / "small").iterdir()) == [
        "a.safetensors",
        "b.safetensors",
    ]


def test_a_directory_of_files_and_several_sizes_at_once(tmp_path):
    folder = tmp_path / "styles"
    folder.mkdir()
    for seed in (1, 2):
        put(folder / f"style-{seed}.safetensors", seed)
    done = run_command(
        "compress", folder, "--ratio", "2,4", "--out", tmp_path / "small", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    made = sorted(path.name for path in (tmp_path / "small").iterdir())
    assert made == [f"style-{seed}-{ratio}.safetensors" for seed in (1, 2) for ratio in (2, 4)]
    (folder / "style-3.safetensors").write_bytes(b"damaged")
    done = run_command("compress", folder, "--ratio", 3, "--out", tmp_path / "again", cwd=tmp_path)
    assert done.returncode != 0
    assert "1 of 3 files were not written: style-3.safetensors" in done.stderr
    assert len(list((tmp_path / "again").iterdir())) == 2


@pytest.mark.parametrize("storage", [None, "float8_e4m3fn", "float8_e5m2", "bfloat16", "float64"])
def test_verify_finds_the_error_that_is_printed_after_rounding(tmp_path, storage):
    put(tmp_path / "style.safetensors")
    source = open_checkpoint(tmp_path / "style.safetensors")
    cut = truncate(source, ratio=3, storage=storage)
    options = [] if storage is None else ["--storage", storage]
    done = run_command(
        "compress",
        "style.safetensors",
        "--ratio",
        3,
        *options,
        "--out",
        "small.safetensors",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    check = verify(source, open_checkpoint(tmp_path / "small.safetensors"))
    assert check.passed
    assert check.rounding <= 1e-15  # nothing beside the error that is recorded
    assert f"weight error {check.relative_error:.4f}" in " ".join(done.stdout.split())
    changed = abs(check.relative_error - cut.relative_error) / cut.relative_error
    if storage is not None and storage.startswith("float8"):
        assert changed > 0.002
        assert f"{cut.relative_error:.4f} before rounding" in " ".join(done.stdout.split())


def test_a_dry_run_shows_the_curve_and_writes_nothing(tmp_path):
    put(tmp_path / "style.safetensors")
    arguments = (
        "compress",
        "style.safetensors",
        "--ratio",
        2,
        "--out",
        "small.safetensors",
        "--dry-run",
    )
    done = run_command(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "times fewer" in done.stdout
    assert "Used truncated SVD" in done.stdout
    curve = json.loads(run_command(*arguments, "--json", "-", cwd=tmp_path).stdout)["curve"]
    assert 2 in [point["ratio"] for point in curve]
    errors = [point["relative_error"] for point in curve]
    assert errors == sorted(errors)
    assert [path.name for path in tmp_path.iterdir()] == ["style.safetensors"]


def test_a_dry_run_without_an_output_takes_the_way_of_a_file_for_a_file(tmp_path):
    put(tmp_path / "style.safetensors")
    asked = ("compress", "style.safetensors", "--ratio", 2, "--dry-run")
    done, named = (
        run_command(*asked, *out, cwd=tmp_path) for out in ((), ("--out", "small.safetensors"))
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == named.stdout
    assert "times fewer" in done.stdout
    # What only a directory holds leads there, as a directory of a PEFT adapter does.
    in_integers = run_command(*asked, "--storage", "int8", cwd=tmp_path)
    folder = write_lora_directory(tmp_path / "peft")
    of_directory = run_command("compress", folder, "--ratio", 2, "--dry-run")
    for other in (in_integers, of_directory):
        assert other.returncode == 0, other.stderr
        assert "Used truncated SVD" not in other.stdout
        assert "low rank" in other.stdout


def test_a_dry_run_of_a_directory_of_files_needs_no_output(tmp_path):
    (tmp_path / "styles").mkdir()
    for name in ("a", "b"):
        put(tmp_path / "styles" / f"{name}.safetensors")
    done = run_command("compress", "styles", "--ratio", 2, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("times fewer") == 2


def test_ranks_as_kohya_asks_for_them(tmp_path):
    put(tmp_path / "style.safetensors")
    for options, ranks in (
        (("--max-rank", 3), {3}),
        (("--energy", 0.7, "--max-rank", 2), {1, 2}),
        (("--ratio", 7, "--min-rank", 1), {1, 2}),
    ):
        done = run_command(
            "compress",
            "style.safetensors",
            *options,
            "--out",
            "small.safetensors",
            "--force",
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        written = open_checkpoint(tmp_path / "small.safetensors")
        assert len(written.layers) == 6
        assert {layer.rank for layer in written.layers} == ranks
        done = run_command("verify", "style.safetensors", "small.safetensors", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


def test_without_a_goal_the_goals_are_named(tmp_path):
    put(tmp_path / "style.safetensors")
    done = run_command("compress", "style.safetensors", "--out", "o.safetensors", cwd=tmp_path)
    assert done.returncode == 2
    for option in ("--ratio N", "--bytes N", "--max-rank N", "--energy SHARE", "--rtol E"):
        assert option in done.stderr


def test_a_file_of_so_many_bytes_is_no_larger(tmp_path):
    source = open_checkpoint(put(tmp_path / "style.safetensors"))
    size = 12_000
    out = truncate(source, bytes=size).save(tmp_path / "small.safetensors")
    assert out.stat().st_size <= size
    with pytest.raises(BudgetError, match="header and other tensors alone take"):
        truncate(source, bytes=1000)


def test_a_file_that_became_larger_is_warned_of(tmp_path):
    put(tmp_path / "style.safetensors")
    arguments = (
        "compress",
        "style.safetensors",
        "--ratio",
        1.2,
        "--storage",
        "float32",
        "--out",
        "o.safetensors",
    )
    done = run_command(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "smaller numbers (--storage float16)" in " ".join(done.stderr.split())


@pytest.mark.parametrize(("word", "right"), [("params", "parameters"), ("ration", "ratio")])
def test_a_misspelt_goal_of_a_program_is_told_the_right_word(tmp_path, word, right):
    source = open_checkpoint(put(tmp_path / "style.safetensors"))
    with pytest.raises(LsrError, match=f"truncate takes no '{word}'; did you mean '{right}'"):
        truncate(source, **{word: 2})
    with pytest.raises(LsrError, match=f"compress takes no '{word}'"):
        compress(source, **{word: 2})
    with pytest.raises(BudgetError, match="a plan was given, and ratio beside it"):
        truncate(source, CompressionPlan(ratio=2), ratio=3)


HALVES = {
    "torchtune": ("layers.{}.attn.q_proj.lora_b.weight", "layers.{}.attn.q_proj.lora_a.weight"),
    "diffusers": ("unet.mid_block.{}.to_q.lora_B.weight", "unet.mid_block.{}.to_q.lora_A.weight"),
}


def put_layers(path, form, rank=4):
    """Five layers of unequal size and decay."""
    rng, tensors = np.random.default_rng(3), {}
    for i in range(5):
        up, down = (key.format(i) for key in HALVES[form])
        tensors[up] = (
            rng.standard_normal((24 + 8 * i, rank)) * 0.5 ** (i * np.arange(rank) / 2)
        ).astype(np.float32)
        tensors[down] = rng.standard_normal((rank, 32)).astype(np.float32)
    save_file(tensors, path)
    return open_checkpoint(path, alpha=4.0 if form == "torchtune" else None)


def stacked_experts(folder):
    """Four experts of one stack of rank 2, and a layer beside it."""
    rng = np.random.default_rng(4)
    experts, layer = (
        f"base_model.model.layers.0.{name}" for name in ("mlp.experts", "self_attn.q_proj")
    )
    tensors = {
        f"{experts}.lora_A.weight": rng.standard_normal((8, 16)),
        f"{layer}.lora_A.weight": rng.random((2, 16)),
    }
    tensors |= {
        f"{experts}.lora_B.weight": rng.standard_normal((12, 8)),
        f"{layer}.lora_B.weight": rng.random((16, 2)),
    }
    fields = {"target_parameters": ["mlp.experts.down_proj"], "target_modules": ["q_proj"], "r": 2}
    tensors = {key: array.astype(np.float32) for key, array in tensors.items()}
    return open_checkpoint(write_lora_directory(folder / "experts", tensors, **fields))


@pytest.mark.parametrize("goal", [{"ratio": 1.4}, {"ratio": 2.5}, {"rtol": 0.3}])
@pytest.mark.parametrize("form", [*HALVES, "experts"])
def test_the_parameters_of_a_cut_are_those_in_the_file(tmp_path, form, goal):
    source = (
        stacked_experts(tmp_path)
        if form == "experts"
        else put_layers(tmp_path / "style.safetensors", form)
    )
    cut = truncate(source, **goal)
    path = cut.save(tmp_path / ("small" if form == "experts" else "small.safetensors"))
    back = open_checkpoint(path, alpha=4.0 if form == "torchtune" else None)
    assert cut.parameters == back.adapter_parameters
    assert cut.parameters <= source.adapter_parameters / goal.get("ratio", 1)
    assert verify(source, back).relative_error == pytest.approx(cut.relative_error, rel=1e-5)


@pytest.mark.parametrize("form", [*HALVES, "experts"])
def test_the_error_that_is_recorded_is_that_of_rounded_numbers(tmp_path, form):
    if form == "experts":
        source = stacked_experts(tmp_path)
        out = tmp_path / "small"
    else:
        source = put_layers(tmp_path / "style.safetensors", form)
        out = tmp_path / "small.safetensors"
    cut = truncate(source, ratio=1.4, storage="float8_e4m3fn")
    back = open_checkpoint(cut.save(out), alpha=4.0 if form == "torchtune" else None)
    check = verify(source, back)
    assert check.passed
    assert check.rounding == 0.0
    assert check.relative_error > 1.0001 * cut.relative_error


def test_verify_knows_the_layers_that_a_cut_left_out(tmp_path):
    source = put_layers(tmp_path / "style.safetensors", "diffusers")
    cut = truncate(source, ratio=8)
    assert 0 in cut.ranks
    check = verify(source, open_checkpoint(cut.save(tmp_path / "small.safetensors")))
    assert check.passed
    assert check.recorded
    tensors = load_file(tmp_path / "small.safetensors")
    with safe_open(tmp_path / "small.safetensors", "np") as stored:
        metadata = stored.metadata()
    for key in HALVES["diffusers"]:
        del tensors[key.format(cut.ranks.index(1))]
    save_file(tensors, tmp_path / "lost.safetensors", metadata=metadata)
    # A layer that was lost is not one of rank zero.
    assert not verify(source, open_checkpoint(tmp_path / "lost.safetensors")).passed


@pytest.mark.parametrize("ratio", [1.2, 2, 5, 9])
def test_one_rank_for_all_layers_is_the_best_of_those_that_fit(tmp_path, ratio):
    source = put_layers(tmp_path / "style.safetensors", "torchtune")
    ranks = truncate(source, ratio=ratio).ranks
    assert len(set(ranks) - {0}) == 1
    squares = [np.linalg.svd(formed(layer), compute_uv=False) ** 2 for layer in source.layers]
    sizes = [sum(layer.shape) for layer in source.layers]
    every = [np.array(kept) * rank for rank in range(1, 5) for kept in np.ndindex(*(2,) * 5)]
    fitting = [
        chosen for chosen in every if np.dot(chosen, sizes) <= source.adapter_parameters / ratio
    ]
    kept = [
        sum(layer[:rank].sum() for layer, rank in zip(squares, chosen, strict=True))
        for chosen in (*fitting, ranks)
    ]
    # Layers are taken in the order of their gain, not by trying all sets.
    assert kept[-1] >= 0.9 * max(kept)


def test_an_image_lora_is_not_sent_to_a_base_that_is_not_run(tmp_path):
    put(tmp_path / "style.safetensors")
    (tmp_path / "texts.txt").write_text("".join(f"text {i}\n" for i in range(40)))
    done = run_command(
        "compress", "style.safetensors", "--keep", 0.9, "--out", "small", cwd=tmp_path
    )
    assert "without a base ask for a size, such as --ratio 4" in " ".join(done.stderr.split())
    (tmp_path / "b").mkdir()
    with_base = ("--base", "b", "--data", "texts.txt")
    pytest.importorskip("torch")
    done = run_command(
        "compress", "style.safetensors", "--keep", 0.9, *with_base, "--out", "small", cwd=tmp_path
    )
    assert "compress style.safetensors --ratio 4 --out small.safetensors" in " ".join(
        done.stderr.split()
    )
    done = run_command(
        "compress", "style.safetensors", "--ratio", 4, "--out", "small.safetensors", cwd=tmp_path
    )
    assert "With --base it is cut where the outputs change least." in done.stdout


def test_what_a_file_cannot_be_is_refused_before_any_work(tmp_path):
    put(tmp_path / "style.safetensors")
    (tmp_path / "texts.txt").write_text("a text\n")
    for options, words in (
        (
            ("--base", "b", "--data", "texts.txt", "--ratio", 2, "--distill", 5),
            "--distill is not read where a LoRA file is written: name a directory",
        ),
        (
            ("--separation-rank", 2),
            "--separation-rank is not read where a LoRA file is written: name a directory",
        ),
    ):
        done = run_command(
            "compress", "style.safetensors", "--out", "o.safetensors", *options, cwd=tmp_path
        )
        assert done.returncode == 2
        assert words in " ".join(done.stderr.split())
    folder = write_lora_directory(tmp_path / "peft")
    for name in ("o.safetensors", "o.SAFETENSORS"):
        done = run_command("compress", folder, "--ratio", 2, "--out", tmp_path / name)
        assert "peft-lora is a directory with a config" in done.stderr
        assert not (tmp_path / name).exists()
    (tmp_path / "o.safetensors").write_text("mine")
    done = run_command(
        "compress", "style.safetensors", "--ratio", 2, "--out", "o.safetensors", cwd=tmp_path
    )
    assert "already exists" in done.stderr
    assert (tmp_path / "o.safetensors").read_text() == "mine"
    done = run_command(
        "compress",
        "style.safetensors",
        "--ratio",
        2,
        "--out",
        "o.safetensors",
        "--force",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert open_checkpoint(tmp_path / "o.safetensors").format == "kohya"


def test_a_dry_run_has_the_size_that_was_asked_for(tmp_path):
    source = open_checkpoint(put(tmp_path / "style.safetensors"))
    cut = truncate(source, ratio=10)
    assert (10, cut.parameters, cut.relative_error) in list(cut.curve())
    cut = truncate(source, parameters=5000)
    assert (cut.parameters, cut.relative_error) in [point[1:] for point in cut.curve()]


def test_a_directory_comes_back_as_the_plain_lora_that_it_was(tmp_path):
    folder = write_lora_directory(tmp_path / "peft")
    options = ("--ratio", 2, "--to", "same")
    done = run_command("compress", folder, *options, "--out", tmp_path / "small")
    assert done.returncode == 0, done.stderr
    written = open_checkpoint(tmp_path / "small")
    assert written.format == "peft-lora"
    source = open_checkpoint(folder)
    assert written.adapter_parameters <= source.adapter_parameters / 2
    cut = truncate(source, ratio=2)
    for layer, rank in zip(source.layers, cut.ranks, strict=True):
        if rank:
            sigma = np.linalg.svd(formed(layer), compute_uv=False)
            error = np.linalg.norm(formed(layer) - formed(written.layer(layer.name)))
            assert error == pytest.approx(np.linalg.norm(sigma[rank:]), rel=1e-4, abs=1e-6)
    done = run_command("verify", folder, tmp_path / "small")
    assert done.returncode == 0, done.stdout + done.stderr
    # Several sizes lie beside each other, and nothing that is there is replaced.
    options = ("--ratio", "2,4", "--to", "same")
    done = run_command("compress", folder, *options, "--out", tmp_path / "cut")
    assert done.returncode == 0, done.stderr
    assert open_checkpoint(tmp_path / "cut-4").format == "peft-lora"
    done = run_command("compress", folder, *options, "--out", tmp_path / "cut")
    assert done.returncode == 2
    assert "already exists" in done.stderr


def test_a_word_that_to_does_not_take_is_refused_with_those_it_does(tmp_path):
    folder = write_lora_directory(tmp_path / "lora")
    done = run_command(
        "compress", folder, "--ratio", 2, "--to", "kohya", "--out", tmp_path / "small"
    )
    assert done.returncode == 2
    assert "same or mlx, or absent for LSR; got 'kohya'; export writes others" in done.stderr
    with pytest.raises(LsrError, match="cannot cut to 'kohya'"):
        truncate(open_checkpoint(folder), ratio=2, to="kohya")


def language_lora(folder):
    """Two layers of a language model, of unequal ranks and decay."""
    rng = np.random.default_rng(4)
    tensors = {}
    for name, rank in (("model.layers.0.self_attn.q_proj", 8), ("model.layers.2.mlp.up_proj", 6)):
        decay = 0.7 ** np.arange(rank)
        tensors[f"base_model.model.{name}.lora_A.weight"] = rng.standard_normal((rank, 32))
        tensors[f"base_model.model.{name}.lora_B.weight"] = rng.standard_normal((48, rank)) * decay
    halves = {key: array.astype(np.float16) for key, array in tensors.items()}
    return write_lora_directory(folder, halves, r=8, rank_pattern={"model.layers.2.mlp.up_proj": 6})


def test_a_lora_is_cut_and_written_for_mlx_at_once(tmp_path):
    folder = language_lora(tmp_path / "lora")
    options = ("--ratio", 2, "--to", "mlx")
    done = run_command("compress", folder, *options, "--out", tmp_path / "small", "--json", "-")
    assert done.returncode == 0, done.stderr
    source, written = open_checkpoint(folder), open_checkpoint(tmp_path / "small")
    assert (written.format, written.storage) == ("mlx", "float16")
    # One rank for both, the largest that fits: nothing of the size is spent on zeros.
    ranks = json.loads(done.stdout)["ranks"]
    assert set(ranks.values()) == {3}
    assert {layer.rank for layer in written.layers} == {3}
    assert written.adapter_parameters <= source.adapter_parameters / 2
    check = verify(source, written)
    assert check.passed
    assert run_command("verify", folder, tmp_path / "small").returncode == 0
    done = run_command("compress", folder, *options, "--out", tmp_path / "small.safetensors")
    assert done.returncode == 2
    assert "mlx is a directory with a config, no single file: name a directory by --out" in (
        done.stderr
    )
    assert not (tmp_path / "small.safetensors").exists()


def test_several_files_are_cut_for_mlx_each_to_a_directory(tmp_path):
    for number in range(2):
        folder = language_lora(tmp_path / f"{number}")
        tensors = load_file(folder / "adapter_model.safetensors")
        (tmp_path / "in").mkdir(exist_ok=True)
        plain = {key.removeprefix("base_model.model."): array for key, array in tensors.items()}
        save_file(plain, tmp_path / "in" / f"{number}.safetensors")
    put(tmp_path / "in" / "image.safetensors")
    done = run_command(
        "compress", tmp_path / "in", "--ratio", 2, "--to", "mlx", "--out", tmp_path / "out"
    )
    assert done.returncode == 2
    assert "a convolution, which mlx files do not hold" in done.stderr
    assert "1 of 3 files were not written: image.safetensors" in done.stderr
    for number in range(2):
        source = open_checkpoint(tmp_path / "in" / f"{number}.safetensors")
        assert verify(source, open_checkpoint(tmp_path / "out" / f"{number}")).passed


def test_verbose_logs_every_layer_as_resize_lora_does(tmp_path):
    source = open_checkpoint(put(tmp_path / "style.safetensors"))
    options = ("--ratio", 3, "--out", tmp_path / "small.safetensors", "--verbose")
    done = run_command("compress", tmp_path / "style.safetensors", *options)
    assert done.returncode == 0, done.stderr
    cut = truncate(source, ratio=3)
    lines = {line.split(" |")[0].strip(): line for line in done.stdout.splitlines() if "|" in line}
    retained = []
    for layer, sigma, rank in zip(cut.layers, cut.sigma, cut.ranks, strict=True):
        line = lines[layer.name]
        assert f"sum(S) retained: {sigma[:rank].sum() / sigma.sum():.1%}" in line
        kept = np.linalg.norm(sigma[:rank]) / np.linalg.norm(sigma)
        assert f"fro retained: {kept:.1%}" in line
        assert line.endswith(f"dim: {rank} of {layer.rank}")
        retained.append(kept)
    spread = np.std(retained)
    assert f"{spread:.3f}" != f"{spread**2:.3f}"
    words = f"Average Frobenius norm retention: {np.mean(retained):.2%} | std: {spread:.3f}"
    assert words in done.stdout


def test_the_metadata_of_a_network_say_its_new_rank(tmp_path):
    path = put(tmp_path / "style.safetensors")
    metadata = {"ss_network_dim": "8", "ss_network_alpha": "4.0", "ss_training_comment": "mine"}
    save_file(load_file(path), path, metadata=metadata)
    small = truncate(open_checkpoint(path), ratio=3).save(tmp_path / "small.safetensors")
    with safe_open(small, "np") as file:
        written = file.metadata()
    assert written["ss_network_dim"] == "Dynamic"
    assert written["ss_network_alpha"] == "4.0"  # alphas keep their value
    assert written["ss_training_comment"] == "dimension is resized from 8 to Dynamic; mine"
    assert json.loads(written["lsrdecomp"])["storage"] == "float16"
    plan = CompressionPlan(rtol=1e-9, max_rank=2, storage="bfloat16")
    same = truncate(open_checkpoint(path), plan).save(tmp_path / "same.safetensors")
    with safe_open(same, "np") as file:
        written = file.metadata()
    assert written["ss_network_dim"] == "2"
    assert json.loads(written["lsrdecomp"])["storage"] == "bfloat16"
