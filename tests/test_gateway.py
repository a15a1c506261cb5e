"""What strangers send: every kind is held to its limits, and nothing of it runs or is obeyed."""

import ast
import io
import json
import os
import shutil
import stat
import sys
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import pytest
from checkpoint_files import CONFIG, lora_pair
from console import run_command
from damage import READERS
from damage.gateway_kinds import ESCAPES, SLOWEST, cost, hostile
from safetensors.numpy import save
from typer.main import get_command

import lsrdecomp
from lsrdecomp import gateway
from lsrdecomp.cli.app import app
from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.lora.files.adapter_config import check_module_patterns
from lsrdecomp.lora.measure.server_client import connect
from lsrdecomp.lora.search.request import Request
from lsrdecomp.lora.search.result import _from_directory

PACKAGE = Path(lsrdecomp.__file__).parent
DEMO = PACKAGE / "cli" / "demo_adapter"
ROOT = PACKAGE.parent
EVIL = """
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
Path({mark!r}).write_text("executed")
class EvilConfig(GPT2Config):
    model_type = "evil"
class EvilModel(GPT2LMHeadModel):
    config_class = EvilConfig
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""


def test_the_table_in_security_is_the_gateways():
    assert gateway.kinds_table() in (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_every_base_is_opened_through_the_gateway():
    """PEFT's own classes read configs and tensors, and run no code of a directory."""
    own = {"PeftModel", "PeftConfig", "LsrConfig", "super"}
    elsewhere = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr != "from_pretrained":
                continue
            owner = ast.unparse(node.func.value).partition("(")[0]
            if owner not in own:
                elsewhere.append((path.name, owner))
    # A single model of diffusers, whose class is held to be one of that library.
    assert sorted(elsewhere) == [("diffusion_base.py", "loader"), ("gateway.py", "loader")]


def test_every_model_of_a_config_is_built_without_remote_code():
    """``from_config`` of transformers asks too; that of diffusers has no such code."""
    unsaid = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            words = {keyword.arg for keyword in node.keywords}
            if node.func.attr == "from_config" and "trust_remote_code" not in words:
                unsaid.append((path.name, ast.unparse(node.func.value)))
    assert unsaid == [("base_modules.py", "model_class")]


OPENERS = {"load_base", "open_adapter", "open_base", "open_bases", "open_tokenizer"}


def test_whoever_opens_a_base_passes_on_whether_its_code_is_trusted():
    unsaid = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            words = {keyword.arg for keyword in node.keywords}
            if name in OPENERS and words.isdisjoint({"trust_remote_code", None}):
                unsaid.append((path.name, name))
    # Tokenizers of models that are measured: those are strangers beside the base that is trusted.
    assert sorted(unsaid) == [
        ("merged_models.py", "open_tokenizer"),
        ("output_meter.py", "open_tokenizer"),
    ]


def test_every_verb_that_opens_a_base_has_the_door():
    for verb, command in get_command(app).commands.items():
        options = {option for each in command.params for option in each.opts}
        if "--base" in options or verb == "calibrate":
            assert "--trust-remote-code" in options, verb


@pytest.mark.parametrize("verb", ["inspect", "export"])
def test_trust_without_a_base_is_refused(verb, tmp_path):
    out = [] if verb == "inspect" else ["--out", str(tmp_path / "out")]
    done = run_command(verb, str(DEMO), "--trust-remote-code", *out)
    assert done.returncode == 2
    assert "give --base BASE" in done.stderr
    assert not (tmp_path / "out").exists()


def make_evil(folder, *, model=True, tokenizer=True):
    """Write a base and a LoRA, then let the base name program code of its own."""
    from tiny_bases import write_directories

    write_directories(folder, "CAUSAL_LM")
    base = folder / "base"
    mark = folder / "executed"
    (base / "evil.py").write_text(EVIL.format(mark=str(mark)))
    changes = {}
    if model:
        changes["config.json"] = {
            "model_type": "evil",
            "auto_map": {
                "AutoConfig": "evil.EvilConfig",
                "AutoModel": "evil.EvilModel",
                "AutoModelForCausalLM": "evil.EvilModel",
            },
        }
    if tokenizer:
        changes["tokenizer_config.json"] = {
            "tokenizer_class": "EvilTokenizer",
            "auto_map": {"AutoTokenizer": [None, "evil.EvilTokenizer"]},
        }
    for name, fields in changes.items():
        content = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps(content | fields))
    return base, mark


def verbs(folder, base):
    lora = str(folder / "lora")
    texts = str(folder / "texts.txt")
    Path(texts).write_text("w1 w2 w3\n" * 40)
    out = str(folder / "out")
    measured = ["--base", str(base), "--data", texts]
    return {
        "compress": ["compress", lora, *measured, "--keep", "0.9", "--out", out],
        "calibrate": ["calibrate", str(base), "--adapter", lora, "--text", texts, "--out", out],
    }


@pytest.mark.parametrize("verb", ["compress", "calibrate"])
def test_remote_code_is_refused_in_one_line_without_a_question(verb, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    base, mark = make_evil(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    result = run_command(*verbs(tmp_path, base)[verb])
    assert result.returncode == 2
    lines = result.stderr.strip().splitlines()
    (line,) = [line for line in lines if not line.startswith("lsrdecomp: step")]
    assert "remote code" in line
    assert "--trust-remote-code" in line
    assert not mark.exists()
    assert not (tmp_path / "out").exists()


def test_remote_code_of_a_tokenizer_does_not_run(tmp_path):
    """transformers has a tokenizer of its own for this kind of model, and takes that."""
    pytest.importorskip("torch")
    from lsrdecomp.lora.base.base_files import open_tokenizer

    base, mark = make_evil(tmp_path, model=False)
    assert type(open_tokenizer(base)).__name__ != "EvilTokenizer"
    assert not mark.exists()


def test_remote_code_of_a_trusted_author_runs(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    from lsrdecomp.lora.base.open_bases import load_base

    base, mark = make_evil(tmp_path)
    with pytest.raises(CheckpointError, match="trust_remote_code=True"):
        load_base(base, tmp_path / "lora")
    assert not mark.exists()
    opened = load_base(base, tmp_path / "lora", trust_remote_code=True)
    assert mark.exists()
    assert type(opened.model.get_base_model()).__name__ == "EvilModel"


HOSTILE = list(hostile())


def test_hostile_inputs_are_many():
    assert len(HOSTILE) >= 300
    assert len({(name, content) for name, _, content in HOSTILE}) >= 300


@pytest.mark.parametrize("name", sorted({name for name, _, _ in HOSTILE}))
def test_hostile_inputs_neither_hang_nor_run_nor_write_to_the_terminal(
    name, tmp_path, monkeypatch, capfd
):
    if READERS[name].torch:
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gateway, "TEMPLATE_SECONDS", 0.3)
    cost(name, READERS[name].seeds()[0], tmp_path)  # what is imported once
    for kind, what, content in HOSTILE:
        if kind == name:
            seconds = cost(name, content, tmp_path)
            # A class's own module is imported when it is first named.
            assert seconds < SLOWEST or name == "class_name", what
    assert not Path("EXECUTED").exists()
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err == ""


@pytest.mark.parametrize("escape", ESCAPES)
def test_names_of_strangers_do_not_act_on_the_terminal(escape, tmp_path):
    if "\ud800" <= escape <= "\udfff":
        escape = "\x1b"  # no file holds half a character
    name = f"a{escape}b"
    config = CONFIG | {"base_model_name_or_path": name, "task_type": name}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes(save(lora_pair("q")))
    for arguments in (["inspect", tmp_path], ["inspect", tmp_path, "--wide"]):
        result = run_command(*arguments)
        printed = (result.stdout + result.stderr).replace("\n", "")
        assert printed
        assert printed.isprintable()


def test_chat_templates_that_people_use_are_within_the_limits():
    real = (
        "{%- set ns = namespace(seen=false) -%}{% for m in messages %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>' }}"
        "{{ '  ' * 2 }}{% if loop.index0 % 2 == 0 %}{% continue %}{% endif %}{% endfor %}"
        "{% generation %}{{ 'x' }}{% endgeneration %}{{ 26 * loop_count }}"
    )
    gateway.check_template(real)


UNSLOTH = (
    r"(?:.*?(?:vision|image|visual|patch|embed).*?(?:self_attn|attention|attn|mlp|dense).*?"
    r"(?:qkv|proj|fc1|fc2|q_proj|k_proj|v_proj|o_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\."
    r"(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:q_proj|k_proj|v_proj)))"
)


@pytest.mark.parametrize(
    "pattern", [UNSLOTH, r".*\.(q_proj|v_proj)", r"^(?!.*visual).*(?:q_proj|k_proj|down_proj).*"]
)
def test_patterns_that_tools_write_are_within_the_limits(pattern, tmp_path):
    check_module_patterns({"target_modules": pattern}, tmp_path)


# -- what is written for others --------------------------------------------------------------------


def test_a_written_directory_names_no_path_of_this_machine(tmp_path, monkeypatch):
    """People upload it: paths start from the directory, or are names."""
    here = tmp_path / "here"
    shutil.copytree(DEMO.with_name("demo_statistics"), here / "statistics")
    monkeypatch.chdir(tmp_path)
    words = ("--statistics", here / "statistics", "--separation-rank", "1", "--out", here / "small")
    done = run_command("compress", DEMO, *words)
    assert done.returncode == 0, done.stderr
    for file in (here / "small").iterdir():
        assert str(tmp_path).encode() not in file.read_bytes(), file.name
    record = json.loads((here / "small" / "compression.json").read_text())
    assert record["settings"]["statistics"] == "../statistics"
    assert _from_directory(["/elsewhere/of/mine.txt"], here / "small") == ["mine.txt"]


def test_a_card_calls_digests_digests(tmp_path):
    """A reader of the card took the digest of peft_type for a peft_type."""
    lsrdecomp.compress(DEMO, separation_rank=1).save(tmp_path / "small")
    card = (tmp_path / "small" / "README.md").read_text(encoding="utf-8")
    record = json.loads(card.partition("```json lsrdecomp\n")[2].partition("\n```")[0])
    assert "peft_type" in record["config_digests"]
    assert "config" not in record


def test_verify_takes_paths(tmp_path):
    lsrdecomp.compress(DEMO, separation_rank=1).save(tmp_path / "small")
    assert lsrdecomp.lora.measure.verify(str(DEMO), tmp_path / "small").passed


@pytest.mark.skipif(sys.platform == "win32", reason="rights of POSIX")
def test_a_saved_matrix_has_the_rights_that_the_umask_leaves(tmp_path):
    matrix = lsrdecomp.decompose(np.eye(4), "2x2, 2x2", rank=1)
    before = os.umask(0o077)
    try:
        path = matrix.save(tmp_path / "m.safetensors")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        os.umask(0o002)
        path = matrix.save(tmp_path / "m.safetensors", overwrite=True)
        assert stat.S_IMODE(path.stat().st_mode) == 0o664
    finally:
        os.umask(before)


class Endless(io.RawIOBase):
    """A reply that goes on for ever, and counts what was read of it."""

    read_bytes = 0

    def read1(self, size):
        self.read_bytes += size
        return b" " * size


def test_a_reply_without_end_is_not_read_to_its_end(monkeypatch, tmp_path):
    reply = Endless()
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: reply)
    with pytest.raises(LsrError, match="answers more than"):
        connect("http://127.0.0.1:1", None, tmp_path / "a.safetensors")
    assert reply.read_bytes < 2 * gateway.REPLY_BYTES


def test_what_a_server_names_and_says_is_shown_without_escapes(monkeypatch, tmp_path):
    name = "a\x1b]0;owned\x07\u202eb"
    entries = json.dumps([{"id": 0, "path": name}, {"id": 1, "path": "c"}]).encode()
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: io.BytesIO(entries))
    with pytest.raises(LsrError, match="has 2 adapters") as caught:
        connect("http://127.0.0.1:1", None, tmp_path / "a.safetensors")
    assert str(caught.value).isprintable()

    def refuse(*_, **__):
        raise HTTPError("http://s", 500, "no", {}, io.BytesIO(b"\x1b]0;owned\x07boom"))

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(LsrError, match="status 500") as caught:
        connect("http://127.0.0.1:1", None, tmp_path / "a.safetensors")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["trust_remote_code", "trust-remote-code"])
def test_no_file_opens_the_door_to_remote_code(name, tmp_path):
    """A compression.json or a plan may be a stranger's."""
    (tmp_path / "run.toml").write_text(f'[compress]\nbase = "b"\n{name} = true\n')
    (tmp_path / "run.json").write_text(json.dumps({"settings": {"base": "b", name: True}}))
    (tmp_path / "finetune.toml").write_text(f'model = "b"\ntrain = "t.tsv"\n{name} = true\n')
    for verb, file in (("compress", "run.toml"), ("compress", "run.json")):
        done = run_command(verb, DEMO, "--config", tmp_path / file, "--out", tmp_path / "out")
        assert done.returncode == 2
        assert "is read from no file" in done.stderr
    done = run_command("finetune", "--config", tmp_path / "finetune.toml", "--out", tmp_path / "o")
    assert done.returncode == 2
    assert "is read from no file" in done.stderr
    trusted = Request.parse({"base": "b", "data": "d", "keep": 0.9, "trust_remote_code": True})
    assert trusted.measured.trust_remote_code
    assert "trust_remote_code" not in trusted.to_json()
