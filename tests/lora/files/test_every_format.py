"""The table of formats in the docs: each cell is tried on a small file of that format."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from format_files import KEYS, OUTSIDE, write_format

import lsrdecomp as lsr
from lsrdecomp.errors import LsrError
from lsrdecomp.lora.compress import export_lora, truncate
from lsrdecomp.lora.measure import verify
from lsrdecomp.lora.search import CompressionPlan

transformers = pytest.importorskip("transformers")
from tiny_tokenizer import word_tokenizer  # noqa: E402 - after the skip

from lsrdecomp.errors import CalibrationError  # noqa: E402
from lsrdecomp.lora.base.open_bases import load_base  # noqa: E402

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "formats.md"
HEAD = (
    "file",
    "read as",
    "LSR",
    "cut in its own format",
    "LSR and back",
    "to PEFT",
    "to kohya",
    "to diffusers",
    "to mlx",
)
HEAD += ("calibrate",)


def tried(make):
    """Whether what was made is verified against its source; a refusal is a dash."""
    try:
        return "yes" if make() else "NO"
    except LsrError:
        return "–"


BASES = TemporaryDirectory(prefix="lsrdecomp-bases-")


@cache
def base(of_experts):
    """A language model whose only block has the layer that formats adapt, or two such experts."""
    folder = Path(BASES.name) / str(of_experts)
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes)
    if of_experts:
        experts = {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
            "head_dim": 32,
        }
        config = transformers.Qwen3MoeConfig(**sizes, **experts)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@cache
def row(form):
    """The cells of a format."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        alpha = 4.0 if form in OUTSIDE else None
        written = folder / write_format(folder, form)
        source = lsr.open_checkpoint(written, alpha=alpha)
        small = lsr.open_checkpoint(lsr.compress(source, ratio=1.5).save(folder / "small"))

        def sound(path):
            try:
                made = lsr.open_checkpoint(path)
            except LsrError:
                made = lsr.open_checkpoint(path, alpha=alpha)
            check = verify(source, made)
            return (
                check.passed
                and check.recorded
                and {layer.dtype for layer in made.layers} == {"float16"}
            )

        def measured():
            if list(load_base(base("experts" in form), written).modules) != [
                layer.name for layer in source.layers
            ]:
                raise CalibrationError("its layers are no Linear layers of the base")
            return True

        def cut():
            return sound(
                truncate(source, CompressionPlan(ratio=1.5)).save(folder / "cut.safetensors")
            )

        def export(to):
            return sound(export_lora(small, folder / f"to-{to}.safetensors", to=to, like=source))

        cells = [tried(lambda: sound(small.path)), tried(cut)]
        formats = ("same", "lora", "kohya", "diffusers", "mlx")
        cells += [tried(lambda to=to: export(to)) for to in formats]
        cells.append(tried(measured))
        return (form, source.format, *cells)


@pytest.mark.parametrize("form", KEYS)
def test_the_row_of_a_format_in_the_docs_is_what_happens(form):
    cells = row(form)
    assert cells[2] == cells[5] == "yes"
    assert "NO" not in cells
    line = f"| {' | '.join(cells)} |"
    assert line in PAGE.read_text(encoding="utf-8").splitlines(), line


def test_the_table_in_the_docs_has_a_row_for_every_format_and_no_other():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index(f"| {' | '.join(HEAD)} |") + 2
    named = [
        line.split(" | ")[0].removeprefix("| ") for line in lines[start : start + len(KEYS) + 1]
    ]
    assert named[:-1] == list(KEYS)
    assert named[-1] in ("", ":::")  # where the table ends
