"""Faults of adapter_config.json: its text, and each of its fields."""

from __future__ import annotations

from collections.abc import Iterator

from damage.adapter import Fault, collect, settings, tensors


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
    yield "101 MB", settings(lambda: b" " * 101_000_000 + b"{}")
    for number in ("NaN", "Infinity", "-Infinity"):
        yield f"alpha {number}", tensors(lora_alpha=float(number))
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 808\n"
    yield "git-lfs pointer", settings(pointer)
    yield "integer of 10,000 digits", settings(b'{"peft_type":"LORA","r":' + b"9" * 10_000 + b"}")


OTHER_TYPES = (
    "ADAMSS BOFT ADAPTION_PROMPT IA3 BEFT LILY OFT POLY LN_TUNING VERA FROD PVERA "
    "FOURIERFT GLORA XLORA HRA VBLORA UNILORA CPT MISS RANDLORA ROAD TRAINABLE_TOKENS HIRA "
    "SHIRA C3A WAVEFT OSF DELORA GRALORA CARTRIDGE TINYLORA PSOFT PEANUT SHADOW SUPERTUNING "
    "DEFT PROMPT_TUNING MULTITASK_PROMPT_TUNING P_TUNING PREFIX_TUNING"
)


@collect("config")
def _config() -> Iterator[tuple[str, Fault]]:
    for peft_type in OTHER_TYPES.split():
        yield f"peft_type {peft_type}", tensors(peft_type=peft_type)
    for value in (None, "", "lora", 3, [], {}, "LORA\n", "X" * 5000):
        yield f"peft_type {str(value)[:20]!r}", tensors(peft_type=value)
    for value in (0, -1, 2.0, "2", None, True, [], 2**40, 10**30, 3):
        yield f"r {value!r}", tensors(r=value)
    for value in ("4", None, True, [], {}, 10**400):
        yield f"lora_alpha {str(value)[:12]}", tensors(lora_alpha=value)
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
            yield f"{field} {value!r}", tensors(**{field: value})
        for pattern in (
            "(a+)+$",
            "(a|a)*b",
            "(.*)*x",
            ".*.*.*.*.*x",
            "(a?){50}" + "a" * 50,
            "a?" * 40 + "a" * 40,
            "x" * 70_000,
            "(" * 500,
        ):
            yield f"{field} of years: {pattern[:12]}", tensors(**{field: {pattern: 2}})
        yield f"{field} of 100 wildcards", tensors(**{field: {f".*{i}": 2 for i in range(100)}})
    yield "rank_pattern that is not the file's", tensors(rank_pattern={"q": 7})
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
        yield f"{field} {value}", tensors(**{field: value})
    for start in ("pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "loftq", "PiSSA"):
        yield f"init_lora_weights {start}", tensors(init_lora_weights=start)
