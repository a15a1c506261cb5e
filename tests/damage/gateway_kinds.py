"""Readers of what else strangers send, and hostile contents of every kind of the gateway."""

from __future__ import annotations

import io
import json
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from checkpoint_files import CONFIG, raw_safetensors

from damage.adapter_readers import sound_configs
from damage.reader import reader
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.lora.files.adapter_config import Config, Scales, check_carried
from lsrdecomp.lora.files.file_checks import parse_json

SLOWEST = 2.0
"""Seconds of a processor that any content may cost."""
NAME = "model.layers.0.self_attn.q_proj." + "a.b" * 20
"""The name of a module, long enough that a bad pattern does not come back."""


@reader(sound_configs)
def patterns(content: bytes, folder: Path) -> None:
    """The patterns of a config, matched as PEFT matches by them."""
    raw = parse_json(content, folder / "adapter_config.json")
    config = Config(raw, folder / "adapter_config.json")
    check_carried(config)
    Scales(config, 1, 1.0).scale(NAME, 1)
    for field in ("target_modules", "exclude_modules"):
        if isinstance(raw.get(field), str):
            re.fullmatch(raw[field], NAME)
    layers = raw.get("layers_pattern") or []
    for pattern in [layers] if isinstance(layers, str) else layers:
        re.match(rf".*\.{pattern}\.(\d+)\.", NAME)


def sound_replies() -> list[bytes]:
    adapters = [{"id": 0, "path": "a.gguf", "scale": 1.0}]
    models = {"data": [{"id": "base"}, {"id": "a", "parent": "base"}]}
    return [json.dumps(reply).encode() for reply in (adapters, models)]


@reader(sound_replies)
def reply(content: bytes, folder: Path) -> None:
    """What a server answers when it is asked for its adapters."""
    from lsrdecomp.lora.measure.server_client import connect

    with patch("urllib.request.urlopen", lambda *_, **__: io.BytesIO(content)):
        connect("http://127.0.0.1:1", None, folder / "a.safetensors")


TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@reader(lambda: [TEMPLATE.encode()], torch=True)
def template(content: bytes, folder: Path) -> None:
    """The chat template of a tokenizer, which writes a short conversation."""
    from transformers.utils.chat_template_utils import render_jinja_template

    from lsrdecomp.lora.base.dataset import PromptExample
    from lsrdecomp.lora.base.tokens import segments

    text = content.decode("utf-8", "replace")

    class Tokenizer:
        chat_template = text
        eos_token = ""
        name_or_path = "t"

        def get_chat_template(self) -> str:
            return text

        def apply_chat_template(self, messages: Any, *, tokenize: bool, **options: Any) -> str:
            assert not tokenize
            (rendered,), _ = render_jinja_template([messages], chat_template=text, **options)
            return str(rendered)

    says = ({"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"})
    segments(PromptExample("", "", str(folder), messages=says), Tokenizer())


def sound_matrix_headers() -> list[bytes]:
    matrix = SeparatedMatrix.from_factors([np.eye(2)[None], np.eye(3)[None]])
    with tempfile.TemporaryDirectory() as folder:
        content = matrix.save(Path(folder) / "m.safetensors").read_bytes()
    return [content[8 : 8 + int.from_bytes(content[:8], "little")]]


@reader(sound_matrix_headers)
def matrix_header(content: bytes, folder: Path) -> None:
    """The header of a separated matrix, with as many bytes behind it as it asks for."""
    size = max((int(text) for text in re.findall(rb"\d{1,4}(?=\])", content)), default=0)
    path = folder / "m.safetensors"
    path.write_bytes(raw_safetensors(content, bytes(size)))
    SeparatedMatrix.load(path)


@reader(lambda: [b"PreTrainedModel", b"GPT2LMHeadModel"], torch=True)
def class_name(content: bytes, _folder: Path) -> None:
    """The class that a config names; only models of the library are made of a config."""
    import transformers

    from lsrdecomp.errors import CheckpointError
    from lsrdecomp.gateway import library_class

    name = content.decode("utf-8", "replace")
    try:
        found = library_class(transformers, name, transformers.PreTrainedModel)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    assert issubclass(found, transformers.PreTrainedModel)


# -- hostile contents ------------------------------------------------------------------------------

ESCAPES = (
    "\x1b[31m",
    "\x1b]0;owned\x07",
    "\x9b31m",
    "\x00",
    "\x07",
    "\x08",
    "\r",
    "\n",
    "\x7f",
    "\x85",
    "\u2028",
    "\u202e",
    "\u2066",
    "\u200f",
    "\u061c",
    "\ufeff",
    "\ud800",
    "\U000e0041",
)
"""Control characters, sequences for terminals, ends of lines and marks of direction."""
CATASTROPHIC = (
    "([a-z_.0-9]+)+X",
    "(a+)+$",
    "(a|a)*b",
    "(.*)*x",
    "(.*a){20}X",
    ".*.*.*.*.*x",
    "(a?){50}" + "a" * 50,
    "a?" * 40 + "a" * 40,
    "(a|b|ab)" * 30,
    "((a|.)(a|.)(a|.))" * 10 + "X",
    "(?=(a+))*",
    "x" * 70_000,
    "(" * 500,
    "[a-z]*[a-z.]*[a-z.]*[a-z.]*[a-z.]*X",
    "(?P<",
    "*",
)
"""Patterns that a matcher does not come back from, and ones that are none."""
TEMPLATES = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 'a' * 9999999 * 9999999 }}",
    "{{ 'a' * 10000000000 }}",
    "{% set n = namespace(a='aa') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "{% set n = namespace(a=[1]) %}{% for i in range(99) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "{% set a = 'aaaaaaaa' %}" + "{% set a = a ~ a %}" * 60 + "{{ a }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ '%99999999999d' % 1 }}",
    "{{ '{:>99999999999}'.format(1) }}",
    "{{ 'a' | center(99999999999) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch EXECUTED') }}",
    "{{ lipsum.__globals__['os'].popen('touch EXECUTED').read() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].clear() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ raise_exception('\x1b[31mred') }}",
    "{{ 1 // 0 }}",
    "{{ nothing.of.this }}",
    "{{ (" * 300,
    "{% if " * 300,
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "x" * 300_000,
    "{% generation %}{{ 'a' * 10**10 }}{% endgeneration %}",
)
CLASSES = (
    *("pipeline", "Trainer", "AutoModel", "AutoConfig", "utils", "PretrainedConfig"),
    *("__loader__", "__dict__", "__class__", "TrainingArguments", "dynamic_module_utils"),
    *("GPT2Config", "GPT2Tokenizer", "os", "sys", "evil.Evil", "../evil", "builtins.eval"),
    "is_torch_available",
)


def _nested(depth: int) -> Iterator[bytes]:
    yield b"[" * depth
    yield b"[" * depth + b"]" * depth
    yield b'{"a":' * depth + b"1" + b"}" * depth
    yield b'{"data":' + b"[" * depth + b"]" * depth + b"}"


def hostile() -> Iterator[tuple[str, str, bytes]]:
    """Yield the name of a reader, what is wrong, and a content."""
    # 1. Nested without end, and long.
    for name in ("config", "patterns", "json_text", "reply", "manifest", "sums", "matrix_header"):
        for depth in (1_000, 200_000):
            for number, content in enumerate(_nested(depth)):
                yield name, f"nested {depth}, {number}", content
        yield name, "a long text", json.dumps({"a" * 100_000: "b" * 100_000}).encode()
    for depth in (1_000, 100_000):
        yield "plan", f"nested {depth}", b"a = " + b"[" * depth
        yield "plan", f"nested table {depth}", b"a = " + b"{a=" * depth
        yield "plan", f"dotted {depth}", b"a" + b".a" * depth + b" = 1"
    nested = "[" * 100_000
    for field in ("kronecker_shape", "figures", "provenance"):
        fields = json.loads(sound_matrix_headers()[0])
        fields["__metadata__"][field] = nested
        yield "matrix_header", f"{field} nested", json.dumps(fields).encode()
    # 2. Patterns.
    for pattern in CATASTROPHIC:
        for field in ("rank_pattern", "alpha_pattern"):
            config = CONFIG | {field: {pattern: 2}}
            yield "patterns", f"{field} {pattern[:20]}", json.dumps(config).encode()
        for field in ("target_modules", "exclude_modules", "layers_pattern"):
            config = CONFIG | {field: pattern}
            yield "patterns", f"{field} {pattern[:20]}", json.dumps(config).encode()
        config = CONFIG | {"layers_pattern": ["layers", pattern]}
        yield "patterns", f"layers_pattern list {pattern[:20]}", json.dumps(config).encode()
    # 3. Characters that act on a terminal.
    for escape in ESCAPES:
        name = f"a{escape}b"
        for field in ("peft_type", "bias", "target_modules", "layers_pattern", "task_type"):
            yield "config", f"{field} {escape!a}", json.dumps(CONFIG | {field: name}).encode()
        for field in ("rank_pattern", "alpha_pattern"):
            config = CONFIG | {field: {name: "x"}}
            yield "config", f"{field} {escape!a}", json.dumps(config).encode()
        entries = [{"id": number, "path": f"{name}{number}"} for number in range(2)]
        yield "reply", f"adapters {escape!a}", json.dumps(entries).encode()
        models = {"data": [{"id": f"{name}{number}"} for number in range(3)]}
        yield "reply", f"models {escape!a}", json.dumps(models).encode()
        raw = name.encode("utf-8", "surrogatepass")
        yield "sums", f"file {escape!a}", b"0" * 64 + b"  " + raw + b"\n"
        yield "plan", f"setting {escape!a}", b"[compress]\n'" + raw + b"' = 1\n"
        yield "template", f"error {escape!a}", b"{{ raise_exception('" + raw + b"') }}"
    # 4. Replies, templates and classes.
    yield "reply", "without end", b"[0," * 8_000_000
    for content in (b"", b"null", b"1", b"\xff\xfe", b"[{}]", b'{"data": 3}', b'{"data": [1, 2]}'):
        yield "reply", repr(content), content
    for text in TEMPLATES:
        yield "template", text[:40], text.encode()
    for text in CLASSES:
        yield "class_name", text, text.encode()


def cost(name: str, content: bytes, folder: Path) -> float:
    """Return the seconds of a processor that a content costs a reader; it may refuse it."""
    from damage.reader import READERS

    start = time.process_time()
    READERS[name](content, folder)
    return time.process_time() - start
