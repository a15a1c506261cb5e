"""A grammar of faults: adapters broken in every way we could name, each written by code.

`FAULTS` maps a name to a function that fills a directory and returns what to open there. Every one
must end in a `CheckpointError` of one line, when opened or at the latest when its layers are
loaded.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_files import CONFIG, PREFIX, lora_pair, raw_safetensors, write_lora_directory
from safetensors.numpy import save, save_file

Fault = Callable[[Path], Path]
FAULTS: dict[str, Fault] = {}
WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
A, B = f"{PREFIX}q.lora_A.weight", f"{PREFIX}q.lora_B.weight"


def collect(group: str) -> Callable[[Callable[[], Iterator[tuple[str, Fault]]]], None]:
    """Add the faults a generator yields to the table, under a group name."""

    def add(generate: Callable[[], Iterator[tuple[str, Fault]]]) -> None:
        for name, fault in generate():
            key = f"{group}: {name}"
            assert key not in FAULTS, key
            FAULTS[key] = fault

    return add


def weights(content: bytes) -> Fault:
    """A sound config beside these bytes for weights."""

    def build(path: Path) -> Path:
        (write_lora_directory(path) / WEIGHTS).write_bytes(content)
        return path

    return build


def settings(content: bytes) -> Fault:
    """Sound weights beside these bytes for a config."""

    def build(path: Path) -> Path:
        (write_lora_directory(path) / SETTINGS).write_bytes(content)
        return path

    return build


def tensors(given: Mapping[str, np.ndarray], **config: Any) -> Fault:
    """These tensors under a sound config."""
    return lambda path: write_lora_directory(path, given, **config)


def configured(tensors: Mapping[str, np.ndarray] | None = None, **config: Any) -> Fault:
    """Sound weights, one field of the config changed."""
    return lambda path: write_lora_directory(path, tensors, **config)


def single(given: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> Fault:
    """A weight file without a config."""

    def build(path: Path) -> Path:
        path.mkdir()
        save_file(dict(given), path / "x.safetensors", metadata=dict(metadata or {}))
        return path

    return build


VALID = save({**lora_pair("q"), **lora_pair("v", seed=1)}, {"format": "pt"})
HEAD = f"{PREFIX}head.weight"


def beside(header: Mapping[str, Any], data: bytes) -> bytes:
    """Return a sound safetensors file with more header entries, offset from the end of its data."""
    length = int.from_bytes(VALID[:8], "little")
    own, payload = json.loads(VALID[8 : 8 + length]), VALID[8 + length :]
    return raw_safetensors({**own, **header}, payload + data)


def shifted(offsets: Any) -> Any:
    """Offsets moved behind the data of the sound file."""
    start = len(VALID) - 8 - int.from_bytes(VALID[:8], "little")
    whole = isinstance(offsets, list) and all(type(offset) is int for offset in offsets)
    return [start + offset for offset in offsets] if whole else offsets


def entry(**change: Any) -> bytes:
    """A sound safetensors file with one more tensor of 24 bytes, whose header entry is changed."""
    fields = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | change
    fields["data_offsets"] = shifted(fields["data_offsets"])
    return beside(
        {HEAD: {key: value for key, value in fields.items() if value is not ...}}, bytes(24)
    )


@collect("bytes")
def _bytes() -> Iterator[tuple[str, Fault]]:
    for size in (0, 1, 7, 8, 9, 20, 100, len(VALID) // 2, len(VALID) - 100, len(VALID) - 1):
        yield f"cut to {size}", weights(VALID[:size])
    for more in (1, 8, 4096):
        yield f"{more} bytes too many", weights(VALID + bytes(more))
    for length in (0, 1, len(VALID), 2**24 + 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1):
        yield f"header length {length}", weights(length.to_bytes(8, "little") + VALID[8:])
    yield "header of 17 MiB", weights(raw_safetensors(b"{" + b" " * (17 * 2**20) + b"}"))
    for text in (
        b"",
        b"[]",
        b"null",
        b"3",
        b'"x"',
        b"{",
        b"{}{}",
        b"{'a':1}",
        b'{"a":}',
        b"\xff\xfe{}",
        b'\xef\xbb\xbf{"a":1}',
    ):
        yield f"header {text!r}", weights(raw_safetensors(text))
    yield "nested header", weights(raw_safetensors(b'{"a":' * 200_000 + b"1" + b"}" * 200_000))
    yield (
        "nested lists",
        weights(raw_safetensors(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}")),
    )
    yield "huge integer", weights(raw_safetensors(b'{"a":' + b"9" * 10_000 + b"}"))
    once = f'"{A}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    twice = f"{{{once},{once.replace('[0,4]', '[4,8]')}}}"
    yield "a name twice", weights(raw_safetensors(twice.encode(), bytes(8)))
    yield "random", weights(np.random.default_rng(0).bytes(5000))
    yield "text", weights(b"<!DOCTYPE html><html><body>404: not found</body></html>")
    yield "zip as safetensors", weights(b"PK\x03\x04" + bytes(200))
    yield (
        "git-lfs pointer",
        weights(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"),
    )
    yield (
        "git-lfs pointer without size",
        weights(b"version https://git-lfs.github.com/spec/v1\n\xff\n"),
    )


@collect("header")
def _header() -> Iterator[tuple[str, Fault]]:
    for dtype in (
        "F31",
        "",
        "f32",
        "float32",
        "F4",
        "C64",
        "BF16 ",
        None,
        3,
        [],
        "F32\n",
        "X" * 10_000,
    ):
        yield f"dtype {str(dtype)[:20]!r}", weights(entry(dtype=dtype))
    for shape in (
        [2, -3],
        [-2, -3],
        [2.0, 3],
        ["2", 3],
        [True, 6],
        [2, None],
        "23",
        6,
        None,
        {},
        [[2], 3],
        [2**64],
        [6, 2**62],
        [1] * 40,
    ):
        yield f"shape {str(shape)[:24]}", weights(entry(shape=shape))
    for shape in ([], [2, 2], [6, 2], [0, 3], [2**40, 2**40], [2**62, 4]):
        yield f"shape {shape} for 24 bytes", weights(entry(shape=shape))
    for offsets in (
        [0],
        [0, 12, 24],
        [24, 0],
        [-24, 0],
        [0, 25],
        [4, 28],
        [0, 2**63],
        [0.0, 24],
        ["0", 24],
        None,
        24,
        [0, 20],
        [4, 24],
    ):
        yield f"offsets {offsets}", weights(entry(data_offsets=offsets))
    for field in ("dtype", "shape", "data_offsets"):
        yield f"no {field}", weights(entry(**{field: ...}))
    yield "an unknown field", weights(entry(strides=[3, 1]))
    for value in (None, [], "x", 1, {}):
        yield f"entry {value!r}", weights(beside({HEAD: value}, b""))
    for value in ([], "x", {"a": 1}, {"a": None}, {"a": {"b": "c"}}):
        yield f"metadata {value}", weights(beside({"__metadata__": value}, b""))
    for name, offsets in (("overlap", [4, 12]), ("hole", [12, 20]), ("same place", [0, 8])):
        places = {"one": [0, 8], "two": offsets}
        two = {
            f"{PREFIX}{k}": {"dtype": "F32", "shape": [2], "data_offsets": shifted(place)}
            for k, place in places.items()
        }
        yield name, weights(beside(two, bytes(offsets[1])))
    late = {HEAD: {"dtype": "U8", "shape": [2], "data_offsets": shifted([2, 4])}}
    yield "a hole before a tensor", weights(beside(late, bytes(4)))


@collect("name")
def _name() -> Iterator[tuple[str, Fault]]:
    names = [
        "",
        "/etc/passwd",
        "../up",
        "a/../../b",
        "..",
        "./here",
        "\\\\host\\share",
        "C:\\x",
        "line\nbreak",
        "tab\tkey",
    ]
    names += [
        "nul\0key",
        "bell\7",
        "\x1b[31mred",
        "\u202eright to left",
        "\u2028line",
        "x" * 600,
        "a..b",
        "\x7f",
        "\ud7ff\u0085",
    ]
    for name in names:
        yield ascii(name)[:40], weights(save({name: np.ones(2, np.float32), **lora_pair("q")}))
    lone = raw_safetensors(b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x")
    yield "lone surrogate", weights(lone)


@collect("config text")
def _config_text() -> Iterator[tuple[str, Fault]]:
    for text in (
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"LORA"',
        b"{'peft_type': 'LORA'}",
        b"\xff\xfe",
        b"\x80abc",
        b"{}{}",
        b'{"r": 01}',
    ):
        yield repr(text), settings(text)
    yield "field twice", settings(b'{"peft_type":"LORA","r":2,"r":4}')
    yield "nested", settings(b'{"a":' * 100_000 + b"1" + b"}" * 100_000)
    yield "17 MiB", settings(b" " * (17 * 2**20) + b"{}")
    for number in ("NaN", "Infinity", "-Infinity"):
        yield (
            f"alpha {number}",
            settings(json.dumps(CONFIG | {"lora_alpha": float(number)}).encode()),
        )
    yield (
        "git-lfs pointer",
        settings(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 808\n"),
    )
    yield "integer of 10,000 digits", settings(b'{"peft_type":"LORA","r":' + b"9" * 10_000 + b"}")


OTHER_TYPES = (
    "ADALORA ADAMSS BOFT ADAPTION_PROMPT IA3 BEFT LILY OFT POLY LN_TUNING VERA FROD PVERA "
    "FOURIERFT GLORA XLORA HRA VBLORA UNILORA CPT MISS RANDLORA ROAD TRAINABLE_TOKENS HIRA "
    "SHIRA C3A WAVEFT OSF DELORA GRALORA CARTRIDGE TINYLORA PSOFT PEANUT SHADOW SUPERTUNING "
    "DEFT PROMPT_TUNING MULTITASK_PROMPT_TUNING P_TUNING PREFIX_TUNING"
)


@collect("config")
def _config() -> Iterator[tuple[str, Fault]]:
    for kind in OTHER_TYPES.split():
        yield f"peft_type {kind}", configured(peft_type=kind)
    for value in (None, "", "lora", 3, [], {}, "LORA\n", "X" * 5000):
        yield f"peft_type {str(value)[:20]!r}", configured(peft_type=value)
    for value in (0, -1, 2.0, "2", None, True, [], 2**40, 10**30, 3):
        yield f"r {value!r}", configured(r=value)
    for value in ("4", None, True, [], {}, 10**400):
        yield f"lora_alpha {str(value)[:12]}", configured(lora_alpha=value)
    for field in ("rank_pattern", "alpha_pattern"):
        for value in (
            [1],
            "q",
            3,
            {"q": "2"},
            {"q": None},
            {"q": True},
            {"(": 2},
            {"[": 2},
            {"*": 2},
            {"(?P<": 2},
        ):
            yield f"{field} {value!r}", configured(**{field: value})
        for pattern in (
            "(a+)+$",
            "(a|a)*b",
            "(.*)*x",
            ".*.*.*.*.*x",
            "(a?){50}" + "a" * 50,
            "a?" * 40 + "a" * 40,
            "x" * 5000,
            "(" * 500,
        ):
            yield f"{field} of years: {pattern[:12]}", configured(**{field: {pattern: 2}})
        yield f"{field} of 100 wildcards", configured(**{field: {f".*{i}": 2 for i in range(100)}})
    yield "rank_pattern that is not the file's", configured(rank_pattern={"q": 7})
    for field, value in {
        "use_dora": True,
        "use_qalora": True,
        "use_bdlora": {"a": 1},
        "alora_invocation_tokens": [1],
        "arrow_config": {"a": 1},
        "kasa_config": {"a": 1},
        "monteclora_config": {"a": 1},
        "lora_bias": True,
        "layer_replication": [[0, 1]],
        "megatron_config": {"a": 1},
        "target_parameters": ["x"],
        "ensure_weight_tying": True,
        "use_something_new": True,
        "target_modules": 3,
        "exclude_modules": {"a": 1},
        "modules_to_save": "score",
        "base_model_name_or_path": ["a"],
        "task_type": 1,
        "bias": None,
        "auto_mapping": {"a": {"b": "c"}},
        "layers_to_transform": [1.5],
        "use_rslora": "yes",
        "fan_in_fan_out": 3,
    }.items():
        yield f"{field} {value}", configured(**{field: value})
    for start in ("pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "loftq", "PiSSA"):
        yield f"init_lora_weights {start}", configured(init_lora_weights=start)


def _halves(a: tuple[int, ...], b: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {A: np.ones(a, np.float32), B: np.ones(b, np.float32)}


@collect("layers")
def _layers() -> Iterator[tuple[str, Fault]]:
    good = lora_pair("q")
    yield "no tensors", tensors({})
    yield "only a head", tensors({f"{PREFIX}head.weight": np.ones((2, 2))})
    yield "A alone", tensors({A: good[A]})
    yield "B alone", tensors({B: good[B]})
    yield "one half of a second layer", tensors({**good, f"{PREFIX}v.lora_A.weight": good[A]})
    shapes = [
        ((3, 6), (4, 2)),
        ((2, 6), (4, 3)),
        ((6, 2), (4, 2)),
        ((2,), (4, 2)),
        ((2, 6), (8,)),
        ((), ()),
        ((12,), (8,)),
    ]
    shapes += [
        ((0, 6), (4, 0)),
        ((2, 0), (4, 2)),
        ((2, 6), (0, 2)),
        ((2, 6, 3), (4, 2)),
        ((2, 6, 3, 3), (4, 2, 1)),
    ]
    shapes += [
        ((2, 6, 3, 3), (4, 2, 3, 3)),
        ((2, 6, 3, 3), (4, 1, 1, 1)),
        ((1, 6), (4, 1)),
        ((3, 6), (4, 3)),
    ]
    for a, b in shapes:
        yield f"A {a} with B {b}", tensors(_halves(a, b))
    for dtype in ("int8", "uint8", "int32", "bool"):
        yield (
            f"{dtype} numbers",
            tensors({name: array.astype(dtype) for name, array in good.items()}),
        )
    for bad in (np.nan, np.inf, -np.inf):
        for name in (A, B):
            broken = good[name].copy()
            broken[1, 1] = bad
            yield f"{bad} in {name[-8]}", tensors({**good, name: broken})
    for dtype in ("float16", "bfloat16", "float64"):
        yield (
            f"nan in {dtype}",
            tensors({name: (array * np.nan).astype(dtype) for name, array in good.items()}),
        )
    for key in (
        "q.lora_A.weight",
        "model.q.lora_A.weight",
        "base_model.q.lora_A.weight",
        "head.weight",
    ):
        yield f"without prefix: {key}", tensors({**good, key: good[A]})
    for part in (
        "lora_magnitude_vector",
        "lora_magnitude_vector.weight",
        "lora_B.bias",
        "lora_E",
        "lora_C.weight",
        "lora_diag",
    ):
        yield part, tensors({**good, f"{PREFIX}q.{part}": np.ones(2, np.float32)})
    for part in ("lora_A.default.weight", "lora_A", "lora_embedding_A.weight", "lora_a.weight"):
        yield (
            part,
            tensors(
                {
                    **good,
                    f"{PREFIX}v.{part}": good[A],
                    f"{PREFIX}v.{part.replace('A', 'B')}": good[B],
                }
            ),
        )
    both = {f"{PREFIX}q.lora_embedding_A": good[A], f"{PREFIX}q.lora_embedding_B": good[B]}
    yield "linear and embedding at once", tensors({**good, **both})


def pickled(make: Callable[[Any], Any], **options: Any) -> Fault:
    """A torch file of whatever ``make(torch)`` gives, in place of the safetensors."""

    def build(path: Path) -> Path:
        import torch

        (write_lora_directory(path) / WEIGHTS).unlink()
        torch.save(make(torch), path / "adapter_model.bin", **options)
        return path

    return build


def binary(content: bytes) -> Fault:
    """These bytes as adapter_model.bin."""

    def build(path: Path) -> Path:
        (write_lora_directory(path) / WEIGHTS).unlink()
        (path / "adapter_model.bin").write_bytes(content)
        return path

    return build


class Evil:
    """Runs a command when unpickled by a careless reader."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch /tmp/unpickled-by-a-careless-reader",)


def _cut_zip(share: float) -> Fault:
    def build(path: Path) -> Path:
        pickled(
            lambda torch: {name: torch.tensor(array) for name, array in lora_pair("q").items()}
        )(path)
        file = path / "adapter_model.bin"
        content = file.read_bytes()
        file.write_bytes(content[: int(share * len(content))])
        return path

    return build


def _zipped(compression: int, records: Mapping[str, bytes]) -> Fault:
    def build(path: Path) -> Path:
        (write_lora_directory(path) / WEIGHTS).unlink()
        with zipfile.ZipFile(path / "adapter_model.bin", "w", compression) as archive:
            for name, content in records.items():
                archive.writestr(name, content)
        return path

    return build


@collect("pickle")
def _pickle() -> Iterator[tuple[str, Fault]]:
    values: dict[str, Callable[[Any], Any]] = {
        "a tensor": lambda torch: torch.ones(2),
        "a number": lambda torch: 3,
        "nothing": lambda torch: None,
        "an empty dict": lambda torch: {},
        "an empty list": lambda torch: [],
        "a list of numbers": lambda torch: [1, 2],
        "a list in a dict": lambda torch: {A: [1, 2]},
        "a state inside": lambda torch: {"state_dict": {A: torch.ones(2, 6), B: torch.ones(4, 2)}},
        "a number for a tensor": lambda torch: {A: 1.0, B: torch.ones(4, 2)},
        "keys that are numbers": lambda torch: {1: torch.ones(2, 6)},
        "a sparse tensor": lambda torch: {A: torch.eye(6).to_sparse(), B: torch.ones(4, 6)},
        "an expanded tensor": lambda torch: {
            A: torch.ones(1).expand(2, 2**38),
            B: torch.ones(4, 2),
        },
        "a quantized tensor": lambda torch: {
            A: torch.quantize_per_tensor(torch.ones(2, 6), 0.1, 0, torch.qint8)
        },
        "a complex tensor": lambda torch: {
            A: torch.ones(2, 6, dtype=torch.complex64),
            B: torch.ones(4, 2),
        },
        "a tensor of nan": lambda torch: {A: torch.full((2, 6), float("nan")), B: torch.ones(4, 2)},
        "one half": lambda torch: {A: torch.ones(2, 6)},
        "a name with a line break": lambda torch: {"a\nb": torch.ones(2)},
        "code": lambda torch: {"x": Evil()},
        "a module": lambda torch: torch.nn.Linear(2, 2),
        "a numpy array": lambda torch: {A: np.ones((2, 6))},
    }
    for name, make in values.items():
        yield name, pickled(make)
        if name not in ("an expanded tensor", "a quantized tensor", "a sparse tensor"):
            yield f"{name}, old format", pickled(make, _use_new_zipfile_serialization=False)
    for share in (0.1, 0.5, 0.9, 0.99):
        yield f"zip cut to {share:.0%}", _cut_zip(share)
    for content in (
        b"",
        b"\x80",
        b"\x80\x02",
        b"\x80\x02}q\x00.",
        b"PK\x03\x04",
        b"hello",
        b"\x80\x05\x95" + b"\xff" * 30,
        bytes(4096),
    ):
        yield f"bytes {content[:8]!r} ({len(content)})", binary(content)
    yield "plain pickle of code", binary(pickle.dumps({"x": Evil()}))
    yield (
        "git-lfs pointer",
        binary(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 307151\n"),
    )
    yield "empty zip", _zipped(zipfile.ZIP_STORED, {})
    yield "zip of texts", _zipped(zipfile.ZIP_STORED, {"a.txt": b"a"})
    yield "zip bomb", _zipped(zipfile.ZIP_DEFLATED, {"archive/data.pkl": bytes(2**25)})
    yield "17 MiB of pickle", _zipped(zipfile.ZIP_STORED, {"archive/data.pkl": bytes(17 * 2**20)})
    yield (
        "zip with an empty pickle",
        _zipped(zipfile.ZIP_STORED, {"archive/data.pkl": b"", "archive/version": b"3\n"}),
    )


@collect("place")
def _place() -> Iterator[tuple[str, Fault]]:
    yield "nothing there", lambda path: path / "absent"
    yield "a file that is absent", lambda path: path / "absent.safetensors"

    def made(fill: Callable[[Path], Any]) -> Fault:
        def build(path: Path) -> Path:
            path.mkdir()
            fill(path)
            return path

        return build

    def instead(fill: Callable[[Path], Any], file: str = WEIGHTS) -> Fault:
        def build(path: Path) -> Path:
            (write_lora_directory(path) / file).unlink()
            fill(path / file)
            return path

        return build

    yield "an empty directory", made(lambda path: None)
    yield (
        "a directory of something else",
        made(lambda path: (path / "README.md").write_text("hello")),
    )
    yield (
        "two weight files",
        made(lambda path: [(path / f"{i}.safetensors").write_bytes(VALID) for i in "ab"]),
    )
    yield "two adapters inside", made(lambda path: [write_lora_directory(path / i) for i in "ab"])
    yield (
        "an unknown weight file",
        made(lambda path: save_file({"a": np.ones(2)}, path / "x.safetensors")),
    )
    yield "no tensor at all", made(lambda path: save_file({}, path / "x.safetensors"))
    for file in (WEIGHTS, SETTINGS):
        yield f"{file} is missing", instead(lambda path: None, file)
        yield f"{file} is a directory", instead(lambda path: path.mkdir(), file)
        yield f"{file} is a pipe", instead(lambda path: os.mkfifo(path), file)
        yield f"{file} is a device", instead(lambda path: path.symlink_to("/dev/zero"), file)
        yield (
            f"{file} leads nowhere",
            instead(lambda path: path.symlink_to("/nonexistent/file"), file),
        )
        yield f"{file} leads in a circle", instead(lambda path: path.symlink_to(path), file)
        yield (
            f"{file} is another text",
            instead(lambda path: path.symlink_to("/etc/hostname"), file),
        )


def lsr(change: Callable[[dict[str, np.ndarray], dict[str, Any]], Any]) -> Fault:
    """An LSR directory, changed before it is saved."""

    def build(path: Path) -> Path:
        rng = np.random.default_rng(0)
        key = f"{PREFIX}q.lsr_"
        given = {
            f"{key}A.factor_1": (2, 2, 3),
            f"{key}A.factor_2": (2, 1, 2),
            f"{key}B.factor_1": (3, 2, 2),
        }
        given[f"{key}B.factor_2"] = (3, 2, 1)
        held = {
            name: rng.standard_normal(shape).astype(np.float32) for name, shape in given.items()
        }
        config = {
            "peft_type": "LSR",
            "r": 2,
            "inner_shape": [2, 1],
            "order": 2,
            "separation_rank": [3, 2],
            "lsr_alpha": 2,
        }
        change(held, config)
        return write_lora_directory(path, held, **config)

    return build


@collect("lsr")
def _lsr() -> Iterator[tuple[str, Fault]]:
    for side in ("A.factor_1", "A.factor_2", "B.factor_1", "B.factor_2"):
        key = f"{PREFIX}q.lsr_{side}"
        yield f"without {side}", lsr(lambda held, _, key=key: held.pop(key))
        yield f"{side} flat", lsr(lambda held, _, key=key: held.update({key: held[key][0]}))
        yield f"{side} empty", lsr(lambda held, _, key=key: held.update({key: held[key][:0]}))
        yield f"{side} fewer terms", lsr(lambda held, _, key=key: held.update({key: held[key][:1]}))
        yield (
            f"{side} of int8",
            lsr(lambda held, _, key=key: held.update({key: held[key].astype("int8")})),
        )
        yield f"{side} nan", lsr(lambda held, _, key=key: held.update({key: held[key] * np.nan}))
        yield (
            f"{side} renamed",
            lsr(lambda held, _, key=key: held.update({key[:-1] + "9": held.pop(key)})),
        )
    for key in (
        "q.lsr_A.factor_0",
        "q.lsr_C.factor_1",
        "q.lsr_A",
        "q.lsr_A.default.factor_1",
        "q.lsr_magnitude_vector",
    ):
        yield (
            f"{key} beside",
            lsr(
                lambda held, _, key=key: held.update({PREFIX + key: np.ones((2, 2, 3), np.float32)})
            ),
        )
    yield "no prefix", lsr(lambda held, _: held.update({"head": np.ones(2)}))
    key = f"{PREFIX}q.lsr_"

    def long(held: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        held.clear()
        for i in range(1, 5):
            held |= {
                f"{key}A.factor_{i}": np.ones((1, 1, 99_991), "float16"),
                f"{key}B.factor_{i}": np.ones((1, 1, 1), "float16"),
            }
        config.update(r=1, inner_shape=None, order=4, separation_rank=1)

    def many(held: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        held.clear()
        for side in "AB":
            held |= {
                f"{key}{side}.factor_{i}": np.ones((1, 1, 1), np.float32) for i in range(1, 401)
            }
        config.update(r=1, inner_shape=None, order=400, separation_rank=1)

    yield (
        "inner sizes that differ",
        lsr(lambda held, _: held.update({f"{key}A.factor_1": np.ones((2, 3, 3), np.float32)})),
    )
    yield "in side of 10^20", lsr(long)
    yield "400 factors", lsr(many)
    yield "order of 2^30", lsr(lambda _, config: config.update(order=2**30, inner_shape=None))
    for field, value in (
        *(("r", value) for value in (0, 3, "2", -1, 2.5)),
        *(("inner_shape", value) for value in ([1, 2], [2], [], "2x1", [2, 0], [2.0, 1])),
        *(("separation_rank", value) for value in (0, 3, [3], [2, 3], [3, 2, 1], "3", [3, True])),
        *(("lsr_alpha", value) for value in ("2", True, [2])),
        *(
            ("shape_pattern", value)
            for value in ([1], {"q": 3}, {"q": {}}, {"q": {"out": [4], "inner": [2], "into": [6]}})
        ),
        *(
            ("shape_pattern", {"q": {"out": [2, 2], "inner": [2, 1], "into": value}})
            for value in ([2, 3], [3], "32", [3, -2])
        ),
        *(("rank_pattern", value) for value in ({"q": 4}, {"q": "2"}, {"(": 2}, [2])),
        ("separation_rank_pattern", {"q": 9}),
        ("alpha_pattern", {"q": None}),
        ("order", 0),
        ("use_dora", True),
    ):
        yield (
            f"{field} {value!r}",
            lsr(lambda _, config, field=field, value=value: config.update({field: value})),
        )


@collect("formats")
def _formats() -> Iterator[tuple[str, Fault]]:
    f = {
        shape: np.ones(shape, np.float32)
        for shape in ((2, 6), (4, 2), (4, 3), (2,), (1,), (2, 2), (0, 6))
    }
    down, up = "lora_unet_q.lora_down.weight", "lora_unet_q.lora_up.weight"
    yield "kohya: down alone", single({down: f[2, 6]})
    yield "kohya: up alone", single({up: f[4, 2]})
    yield "kohya: ranks", single({down: f[2, 6], up: f[4, 3]})
    yield "kohya: empty", single({down: f[0, 6], up: np.ones((4, 0), np.float32)})
    yield "kohya: two alphas", single({down: f[2, 6], up: f[4, 2], "lora_unet_q.alpha": f[(2,)]})
    yield "kohya: alpha alone", single({down: f[2, 6], up: f[4, 2], "lora_unet_v.alpha": f[(1,)]})
    yield (
        "kohya: alpha nan",
        single({down: f[2, 6], up: f[4, 2], "lora_unet_q.alpha": f[(1,)] * np.nan}),
    )
    yield "kohya: mid", single({down: f[2, 6], up: f[4, 2], "lora_unet_q.lora_mid.weight": f[2, 2]})
    for part in ("dora_scale", "diff", "diff_b", "oft_blocks", "on_input", "w_norm"):
        yield f"kohya: {part}", single({down: f[2, 6], up: f[4, 2], f"lora_unet_q.{part}": f[(2,)]})
    for name, (a, b) in {"new": ("lora_A", "lora_B"), "old": ("lora.down", "lora.up")}.items():
        yield f"diffusers {name}: A alone", single({f"unet.q.{a}.weight": f[2, 6]})
        yield (
            f"diffusers {name}: ranks",
            single({f"unet.q.{a}.weight": f[2, 6], f"unet.q.{b}.weight": f[4, 3]}),
        )
    both = {"unet.q.lora_A.weight": f[2, 6], "unet.q.lora_B.weight": f[4, 2]}
    yield "diffusers: both ages", single({**both, "unet.q.lora.down.weight": f[2, 6]})
    old = {
        f"unet.processor.{name}": array
        for name, array in (("to_q_lora.down.weight", f[2, 6]), ("to_q_lora.up.weight", f[4, 2]))
    }
    yield (
        "diffusers: one module twice",
        single({**old, "unet.to_q.lora_A.weight": f[2, 6], "unet.to_q.lora_B.weight": f[4, 2]}),
    )
    yield "diffusers: magnitude", single({**both, "unet.q.lora_magnitude_vector": f[(2,)]})
    for text in (
        "",
        "[]",
        "{",
        '{"unet.use_dora": true}',
        '{"unet.lora_alpha": "x"}',
        '{"unet.peft_type": "IA3"}',
    ):
        yield f"diffusers: header {text}", single(both, {"lora_adapter_metadata": text})
    yield "peft file without config", single(lora_pair("q"))
    yield "cloneofsimo: half", single({"unet:0:up": f[4, 2]})
    yield (
        "cloneofsimo: ranks",
        single({"unet:0:up": f[4, 2], "unet:0:down": np.ones((3, 6), np.float32)}),
    )
    yield (
        "cloneofsimo: rank in header",
        single({"unet:0:up": f[4, 2], "unet:0:down": f[2, 6]}, {"unet:0:rank": "7"}),
    )
    yield "cloneofsimo: tokens only", single({"<s1>": f[(2,)]})
    yield "loralib: no alpha", single({"q.lora_A": f[2, 6], "q.lora_B": f[4, 2]})
    yield "loralib: half", single({"q.lora_A": f[2, 6]})
    yield "loralib: merged", single({"q.lora_A": f[4, 2], "q.lora_B": f[4, 2]})
    yield (
        "kohya: an unknown part",
        single({down: f[2, 6], up: f[4, 2], "lora_unet_q.lora_gate.weight": f[(2,)]}),
    )
    for kind in ("LOHA", "LOKR"):
        yield f"peft {kind}: parts of LoRA", tensors(lora_pair("q"), peft_type=kind)
        yield f"peft {kind}: nothing", tensors({HEAD: f[(2,)]}, peft_type=kind)
    part = {f"{PREFIX}q.lokr_w1": f[2, 2], f"{PREFIX}q.lokr_w2": f[2, 6]}
    for field, value in (
        ("r", 0),
        ("alpha", "x"),
        ("rank_pattern", {"(": 2}),
        ("use_dora", True),
        ("target_modules", 1),
    ):
        yield f"peft LOKR: {field} {value}", tensors(part, peft_type="LOKR", **{field: value})
    hada = {f"m.hada_{part}": f[2, 2] for part in ("w1_a", "w1_b", "w2_a", "w2_b")}
    for part in hada:
        yield (
            f"loha: without {part[-4:]}",
            single({name: array for name, array in hada.items() if name != part}),
        )
        yield f"loha: {part[-4:]} flat", single({**hada, part: f[(2,)]})
        yield f"loha: {part[-4:]} nan", single({**hada, part: f[2, 2] * np.nan})
    wide = {
        name: np.ones((2, 40_000) if name.endswith("a") else (40_000, 2), "float16")
        for name in hada
    }
    yield "loha: rank of 10^9", single(wide)
    core = (
        np.ones((30_000, 1, 1, 1), "float16"),
        np.ones((1, 30_000, 1, 1), "float16"),
        np.ones((1, 30_000, 1, 1), "float16"),
    )
    names = ("lora_unet_q.lora_mid.weight", down, up)
    yield "kohya: product of 10^9", single(dict(zip(names, core, strict=True)))
    yield "loha: sizes", single({**hada, "m.hada_w2_b": f[2, 6]})
    lokr = {"m.lokr_w1": f[2, 2], "m.lokr_w2_a": f[4, 2], "m.lokr_w2_b": f[2, 6]}
    for part in lokr:
        yield (
            f"lokr: without {part[7:]}",
            single({name: array for name, array in lokr.items() if name != part}),
        )
        yield f"lokr: {part[7:]} flat", single({**lokr, part: f[(2,)]})
        yield f"lokr: {part[7:]} nan", single({**lokr, part: lokr[part] * np.nan})
    yield "lokr: whole and split", single({**lokr, "m.lokr_w2": f[2, 6]})
    yield "lokr: core", single({**lokr, "m.lokr_t2": f[2, 2]})
    yield "lokr: dora", single({**lokr, "m.dora_scale": f[(2,)]})


SOUND: dict[str, Fault] = {
    "peft": lambda path: write_lora_directory(path),
    "bytes": weights(VALID),
    "header": weights(entry()),
    "name": weights(save({HEAD: np.ones(2, np.float32), **lora_pair("q")})),
    "layers": tensors(_halves((2, 6), (4, 2))),
    "pickle": pickled(
        lambda torch: {name: torch.tensor(array) for name, array in lora_pair("q").items()}
    ),
    "lsr": lsr(lambda held, config: None),
    "kohya": single(
        {
            "lora_unet_q.lora_down.weight": np.ones((2, 6)),
            "lora_unet_q.lora_up.weight": np.ones((4, 2)),
        }
    ),
    "diffusers": single(
        {"unet.q.lora_A.weight": np.ones((2, 6)), "unet.q.lora_B.weight": np.ones((4, 2))}
    ),
    "cloneofsimo": single({"unet:0:up": np.ones((4, 2)), "unet:0:down": np.ones((2, 6))}),
    "loha": single(
        {f"m.hada_{part}": np.ones((2, 2)) for part in ("w1_a", "w1_b", "w2_a", "w2_b")}
    ),
    "lokr": single(
        {
            "m.lokr_w1": np.ones((2, 2)),
            "m.lokr_w2_a": np.ones((4, 2)),
            "m.lokr_w2_b": np.ones((2, 6)),
        }
    ),
}
