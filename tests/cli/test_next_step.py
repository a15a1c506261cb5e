"""What a verb says at its end can be typed as it stands, for every format that is read."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from console import run_command
from format_files import CONFIGS, KEYS, OUTSIDE, write_format
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from lsrdecomp import compress
from lsrdecomp.cli.app import app
from lsrdecomp.errors import UnsupportedError
from lsrdecomp.lora.compress import export_lora
from lsrdecomp.lora.files import open_checkpoint, write_lora
from lsrdecomp.lora.files.writers.table import writer_names

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 96,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The layer that the text formats adapt here, as a base."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    save_file(
        {"model.layers.0.self_attn.q_proj.weight": np.ones((64, 64), np.float32)},
        folder / "model.safetensors",
    )
    return folder


def update(checkpoint):
    """ΔW of the first layer."""
    layer = checkpoint.layers[0]
    left, right = layer.load()
    return layer.scale * (np.asarray(left, np.float64) @ right)


@pytest.mark.parametrize("form", KEYS)
def test_a_lora_comes_back_as_it_was_by_the_command_shown(form, tmp_path):
    given = write_format(tmp_path, form)
    alpha = ["--alpha", "4"] if form in OUTSIDE else []
    done = run_command(
        "compress", given, *alpha, "--separation-rank", "2", "--out", "small", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"lsrdecomp (export .*)", done.stdout)
    if form in ("peft-lora", "peft-adalora"):
        assert not shown
        assert "Open it with PEFT" in done.stdout
        return
    (command,) = shown
    ran = run_command(*shlex.split(command), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    scale = 4 if alpha else None
    source, small = (
        open_checkpoint(tmp_path / given, alpha=scale),
        open_checkpoint(tmp_path / "small"),
    )
    made = shlex.split(command)[-1]
    back = open_checkpoint(tmp_path / made, alpha=scale)
    checked = run_command("verify", given, made, *alpha, cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    if form == "lycoris":
        assert back.format == "kohya"
        return
    assert (back.format, back.layers[0].dtype) == (source.format, "float16")
    # mlx-lm saves archives no more: such an adapter comes back as it saves them now.
    is_archive = source.weights.suffix == ".npz"
    before = dict(np.load(source.weights)) if is_archive else load_file(source.weights)
    after = load_file(back.weights)
    assert after.keys() == before.keys()
    assert {key: array.dtype for key, array in after.items()} == {
        key: array.dtype for key, array in before.items()
    }
    assert all(after[key] == before[key] for key in before if key.endswith(".alpha"))
    if form not in CONFIGS:
        assert back.metadata["kept"] == "yes"
        assert "sshs_legacy_hash" not in back.metadata
    left, right = small.layers[0].load()
    expanded = [sum(_kron(side, k) for k in range(len(side[0]))) for side in (left, right)]
    expected = small.layers[0].scale * (expanded[0] @ expanded[1])
    np.testing.assert_allclose(update(back), expected, atol=2e-3 * np.abs(expected).max())


def _kron(side, k):
    product = np.ones((1, 1))
    for factor in side:
        product = np.kron(product, np.asarray(factor[k], np.float64))
    return product


@pytest.mark.parametrize("form", ["kohya", "mlx", "torchtune", "peft-lora"])
def test_what_has_no_task_type_is_sent_to_no_base(form, tmp_path):
    given, alpha = write_format(tmp_path, form), ["--alpha", "4"] if form in OUTSIDE else []
    config = tmp_path / given / "adapter_config.json"
    if config.exists():
        config.write_text(json.dumps(json.loads(config.read_text()) | {"task_type": None}))
    order = ["compress", tmp_path / given, *alpha, "--ratio", 30, "--out", tmp_path / "small"]
    order += ["--structure", "lsr"]  # smaller than one component
    done = CliRunner().invoke(app, list(map(str, order)))
    assert "WARNING: little of this adapter is left" in done.stderr
    assert "--base" not in done.stderr
    assert "Allow a larger size" in done.stderr


def test_layers_that_were_zero_are_not_missed(tmp_path):
    rng = np.random.default_rng(0)
    layers = [
        (name, rng.standard_normal((8, 2)), (name in "ab") * rng.standard_normal((2, 8)))
        for name in "abcd"
    ]
    write_lora(tmp_path / "lora", layers=layers, config={})
    done = run_command(
        "compress",
        tmp_path / "lora",
        "--rtol",
        0.1,
        "--storage",
        "float32",
        "--out",
        tmp_path / "small",
    )
    assert (done.returncode, "2 of 4 layers left out" in done.stdout) == (0, True)
    assert "WARNING: little" not in done.stderr


@pytest.mark.parametrize("kind", ["SEQ_CLS", "CAUSAL_LM"])
def test_a_text_lora_is_sent_to_its_base_by_a_command_that_runs(kind, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    from tiny_bases import TEXTS, write_directories

    from lsrdecomp.cli.recommendations import TASKS
    from lsrdecomp.lora.base.base_model import LOADERS

    assert set(TASKS) == set(LOADERS)
    monkeypatch.chdir(write_directories(tmp_path, kind))
    (tmp_path / "TEXTS.txt").write_text(
        "\n".join(f"{text} w{i}" for i in (1, 2) for text, _ in TEXTS)
    )
    Path("runs").mkdir()
    Path("lora").rename("runs/lora")
    where = ["runs", "--name", "lora"]  # which what is recommended has to say in its own way
    done = CliRunner().invoke(
        app, ["compress", *where, "--ratio", "4", "--storage", "int8", "--out", "little"]
    )
    (command,) = re.findall(r"lsrdecomp (compress .*)", done.stderr)
    assert command.endswith("--ratio 4 --storage int8 --out little-measured")
    ran = CliRunner().invoke(
        app, ["base" if word == "BASE" else word for word in shlex.split(command)]
    )
    assert ran.exit_code == 0, (command, ran.output, ran.stderr)
    assert open_checkpoint("little-measured").layers


@pytest.mark.parametrize("form", KEYS)
def test_what_a_refused_export_recommends_is_written(form, base, tmp_path):
    source = open_checkpoint(
        tmp_path / write_format(tmp_path, form), alpha=4 if form in OUTSIDE else None
    )
    small = open_checkpoint(
        compress(source, separation_rank=2, inner_shape=(2, 4)).save(tmp_path / "small")
    )
    for to in ("kohya", "diffusers", "mlx", "same", "lroa"):
        for other in recommended(
            lambda to=to: export_lora(small, tmp_path / f"{to}.safetensors", to=to, like=source)
        ):
            export_lora(small, tmp_path / f"{to}-{other}.safetensors", to=other, like=source)


def recommended(export):
    """The formats that a refusal names instead; none if nothing is refused."""
    try:
        export()
    except UnsupportedError as error:
        return re.findall(
            rf"(?:--to |write |or |did you mean ')({'|'.join(writer_names())})\b", str(error)
        ) or ["none"]
    return ()


OTHERS = {
    "lokr": {
        f"blocks_0_q.{part}": shape
        for part, shape in {"lokr_w1": (8, 8), "lokr_w2": (16, 16)}.items()
    },
    "loha": KEYS["lycoris"],
    "dora": KEYS["comfy wan"] | {"diffusion_model.blocks.0.self_attn.q.dora_scale": (64, 1)},
}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("lokr", "one Kronecker product already, which is not made smaller here: keep it"),
        (
            "loha",
            (
                "is LoHa, read as the LoRA of the same ΔW, and is not written in its own "
                "format: make LSR of it"
            ),
        ),
        ("dora", "merge it into its base, or train it again as plain LoRA"),
    ],
)
def test_what_is_no_file_of_pairs_is_told_why_and_what_to_do(kind, words, tmp_path):
    rng = np.random.default_rng(0)
    save_file(
        {key: rng.standard_normal(shape) for key, shape in OTHERS[kind].items()},
        tmp_path / "style.safetensors",
    )

    def run(*order):
        done = run_command(*order, cwd=tmp_path)
        return done.returncode, " ".join(done.stderr.split())

    small, directory = ("compress", "style.safetensors", "--ratio", "2", "--out"), kind == "loha"
    for order in (
        (*small, "small.safetensors"),
        ("export", "style.safetensors", "--out", "o", "--to", "same"),
    ):
        code, said = run(*order)
        assert (code, words in said) == (2, True), said
        assert "it came from" not in said
    code, said = run(*small, "small")
    assert (code, words in said) == ((0, False) if directory else (2, True)), said
    if kind == "lokr":  # it is told before a base is opened and run
        (tmp_path / "base").mkdir()
        code, said = run(*small[:2], "--base", "base", "--keep", "0.9", "--out", "kept")
        assert (code, words in said) == (2, True), said
    code, said = run("export", "style.safetensors", "--out", "lora", "--to", "lora")
    assert code == (2 if kind == "dora" else 0), said
    assert kind == "dora" or open_checkpoint(tmp_path / "lora").format == "peft-lora"
