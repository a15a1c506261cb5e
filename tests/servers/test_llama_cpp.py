"""Exported adapters in llama.cpp itself, beside PEFT on the base dequantized from one file.

llama.cpp rounds activations to eight bits where weights have four, so the two differ without any
adapter; with one they may differ by little more. Prompts go in as token numbers; the server runs in
this process (package xllamacpp) and is asked over HTTP, as any client would, for adapters at
scales. ``pytest -m servers -s`` prints the figures. Here all adapters are named at the start, and a
request chooses among them; loading one into a running server is not tried.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import lora_pair, write_lora_directory

from lsrdecomp.lora.compress.export import export_lora
from lsrdecomp.lora.files import open_checkpoint, write_lsr
from lsrdecomp.lora.measure import ask_server

pytestmark = pytest.mark.servers

BLOCKS, WIDTH, KEYS = 30, 576, 192
VOCABULARY = """
the a this that every some old new small large river city market doctor teacher engine letter winter
summer house garden red green quiet bright runs writes opens finds builds carries because although
near under after before with without seven twelve paper music science history number
"""
PROMPTS, LENGTH, GIVEN, STEPS = 64, 8, 20, 16
CHANGE = 0.35
CASES = {
    "none": {},
    "a": {"a": 1.0},
    "b": {"b": 1.0},
    "half of a": {"a": 0.5},
    "both": {"a": 1.0, "b": 1.0},
}
GREEDY = ("none", "a", "b")


def factors(
    rng: np.random.Generator, m: int, n: int, rank: int, terms: int = 2
) -> tuple[list, list]:
    """Random B and A as short sums of two Kronecker factors each, of one size for every layer."""
    left = [rng.standard_normal((terms, m // 24, 1)), rng.standard_normal((terms, 24, rank))]
    right = [rng.standard_normal((terms, 1, n // 24)), rng.standard_normal((terms, rank, 24))]
    left[0] *= CHANGE / (terms * np.sqrt(rank * n))
    return left, right


def lsr_adapter(
    folder: Path, seed: int, rank_of: Callable[[int], int], dropped: tuple[str, ...] = ()
) -> Path:
    """An LSR directory over the attention of all blocks."""
    rng = np.random.default_rng(seed)
    sizes = {"q": (WIDTH, WIDTH), "k": (KEYS, WIDTH), "v": (KEYS, WIDTH), "o": (WIDTH, WIDTH)}
    names = {
        f"model.layers.{i}.self_attn.{key}_proj": (i, *sizes[key])
        for i in range(BLOCKS)
        for key in sizes
    }
    tensors = {
        key: value
        for name, (_, m, n) in names.items()
        for key, value in lora_pair(name, m, n, 1).items()
    }
    modules = [f"{key}_proj" for key in sizes]
    source = open_checkpoint(
        write_lora_directory(
            folder / "source", tensors, r=1, target_modules=modules, task_type="CAUSAL_LM"
        )
    )
    layers = [
        (name, *factors(rng, m, n, rank_of(i)))
        for name, (i, m, n) in names.items()
        if name not in dropped
    ]
    return write_lsr(folder / "lsr", source=source, layers=layers, dropped=dropped)


@pytest.fixture(scope="module")
def adapters(
    tmp_path_factory: pytest.TempPathFactory, gguf_file: Path
) -> dict[str, tuple[Path, Path]]:
    """Return LSR directory and GGUF file by name.

    a has rank 2, b ranks 1 to 4 and two layers less.
    """
    folder = tmp_path_factory.mktemp("served")
    dropped = ("model.layers.3.self_attn.q_proj", "model.layers.29.self_attn.o_proj")
    made = {
        "a": lsr_adapter(folder / "a", 0, lambda block: 2),
        "b": lsr_adapter(folder / "b", 1, lambda block: 1 + block % 4, dropped),
    }
    return {
        name: (
            lsr,
            export_lora(
                open_checkpoint(lsr),
                folder / f"{name}.gguf",
                to="gguf",
                storage="f32",
                base=gguf_file,
            ),
        )
        for name, lsr in made.items()
    }


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    pytest.importorskip("xllamacpp")
    from lsrdecomp.lora.base import base_files

    return base_files.packaged_file()


@pytest.fixture(scope="module")
def address(gguf_file: Path, adapters: dict[str, tuple[Path, Path]]) -> Iterator[str]:
    """Of a running server that was started with both adapters."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = str(gguf_file)
    settings.n_ctx, settings.n_parallel, settings.n_gpu_layers = 256, 1, 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.warmup, settings.verbosity = False, -1
    infos = []
    for _, path in adapters.values():
        info = xllamacpp.CommonAdapterLoraInfo()
        info.path, info.scale = str(path), 1.0
        infos.append(info)
    settings.lora_adapters = infos
    server = xllamacpp.Server(settings)
    yield server.listening_address
    del server


@pytest.fixture(scope="module")
def ask(address: str) -> Callable[..., Any]:
    """A request to that server."""

    def request(path: str, fields: object = None) -> Any:
        body = None if fields is None else json.dumps(fields).encode()
        kind = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(address + path, body, kind)) as reply:
            return json.load(reply)

    return request


@pytest.fixture(scope="module")
def prompts() -> np.ndarray:
    """Return token numbers, (64, 8): sentences cut to one length, so that nothing is padded."""
    from lsrdecomp.lora.base.base_files import SMOLLM2, open_tokenizer

    rng, tokenizer = np.random.default_rng(7), open_tokenizer(SMOLLM2)
    texts = [" ".join(rng.choice(VOCABULARY.split(), 2 * LENGTH)) for _ in range(PROMPTS)]
    return np.array([tokenizer(text)["input_ids"][:LENGTH] for text in texts])


@pytest.fixture(scope="module")
def wanted(
    adapters: dict[str, tuple[Path, Path]], prompts: np.ndarray
) -> dict[str, tuple[Any, Any, Any]]:
    """Return what PEFT says of each case.

    Next tokens (64, 20), their log-probabilities, and greedy texts (64, 16).
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    import lsrdecomp.lora.peft  # noqa: F401  (teaches PEFT the type)
    from lsrdecomp.lora.base.base_files import SMOLLM2, find_base

    base = AutoModelForCausalLM.from_pretrained(find_base(SMOLLM2), dtype=torch.float32).eval()
    end = base.generation_config.eos_token_id
    model = None
    for name, (lsr, _) in adapters.items():
        if model is None:
            model = PeftModel.from_pretrained(base, lsr, adapter_name=name)
        else:
            model.load_adapter(lsr, adapter_name=name)
    assert model is not None
    model.eval()
    tokens, found = torch.from_numpy(prompts), {}

    def answer(case: str) -> None:
        with torch.no_grad():
            logits = model(input_ids=tokens, logits_to_keep=1).logits[:, -1]
            best = logits.log_softmax(-1).topk(GIVEN, dim=-1)
            texts = None
            if case in GREEDY:
                settings = {
                    "max_new_tokens": STEPS,
                    "do_sample": False,
                    "eos_token_id": end,
                    "pad_token_id": end,
                }
                made = model.generate(
                    input_ids=tokens, attention_mask=torch.ones_like(tokens), **settings
                )
                texts = made[:, LENGTH:].numpy()
        found[case] = best.indices.numpy(), best.values.numpy(), texts

    for case, scales in CASES.items():
        if not scales:
            with model.disable_adapter():
                answer(case)
            continue
        model.base_model.set_adapter(list(scales))
        layers = [module for module in model.modules() if hasattr(module, "scale_layer")]
        factor = next(iter(scales.values()))
        for layer in layers:
            layer.scale_layer(factor)
        answer(case)
        for layer in layers:
            layer.unscale_layer(factor)
    return found


@pytest.fixture(scope="module")
def served(
    ask: Callable[..., Any], prompts: np.ndarray
) -> dict[str, list[tuple[dict[int, float], list[int]]]]:
    """Return what llama.cpp says of each case and prompt.

    Log-probabilities of the 400 likeliest tokens, and greedy text.
    """
    numbers = {Path(one["path"]).stem: one["id"] for one in ask("/lora-adapters")}
    return {
        case: [
            completion(
                ask,
                prompt,
                [{"id": numbers[name], "scale": scales.get(name, 0.0)} for name in numbers],
                steps,
            )
            for prompt in prompts
        ]
        for case, scales in CASES.items()
        for steps in [STEPS if case in GREEDY else 1]
    }


def completion(
    ask: Callable[..., Any], prompt: np.ndarray, lora: list[dict[str, Any]] | None, steps: int = 1
) -> tuple[dict[int, float], list[int]]:
    fields = {
        "prompt": prompt.tolist(),
        "n_predict": steps,
        "temperature": 0,
        "n_probs": 400,
        "return_tokens": True,
    }
    fields |= {"cache_prompt": False} | ({} if lora is None else {"lora": lora})
    reply = ask("/completion", fields)
    first = reply["completion_probabilities"][0]["top_logprobs"]
    return {token["id"]: token["logprob"] for token in first}, reply["tokens"]


def difference(
    wanted: tuple[Any, Any, Any], served: list[tuple[dict[int, float], list[int]]]
) -> float:
    """Mean absolute difference of log-probabilities, over the tokens that PEFT ranks first."""
    pairs = zip(*wanted[:2], served, strict=True)
    return float(
        np.mean(
            [[abs(seen[t] - p) for t, p in zip(*row, strict=True)] for *row, (seen, _) in pairs]
        )
    )


def agreement(
    wanted: np.ndarray, served: list[tuple[dict[int, float], list[int]]]
) -> tuple[float, float]:
    """Return the shares of greedy steps with the same token, and of texts equal to the end."""
    steps, same, whole = 0, 0, 0
    for text, (_, tokens) in zip(wanted.tolist(), served, strict=True):
        equal = [ours == theirs for ours, theirs in zip(text, tokens, strict=False)]
        first = equal.index(False) if False in equal else len(equal)
        steps, same, whole = (
            steps + min(first + 1, len(equal)),
            same + first,
            whole + (first == len(equal)),
        )
    return same / steps, whole / len(served)


def test_log_probabilities_differ_no_more_with_an_adapter_than_without(wanted, served, record):
    found = {case: difference(wanted[case], served[case]) for case in CASES}
    tokens, plain, _ = wanted["none"]
    effect = {
        case: float(
            np.mean(
                [
                    abs(seen[t] - p)
                    for row, ps, (seen, _) in zip(tokens, plain, served[case], strict=True)
                    for t, p in zip(row, ps, strict=True)
                    if t in seen
                ]
            )
        )
        for case in CASES
    }
    for case in CASES:
        print(
            f"\n{case}: from PEFT {found[case]:.4f} nats, adapter's own effect {effect[case]:.3f}",
            end="",
        )
    server = f"xllamacpp {version('xllamacpp')}"
    for case in CASES:
        assert found[case] <= 1.2 * found["none"], case
        record(server, "server; nats beyond its rounding", "error", found[case] - found["none"])
        assert case == "none" or effect[case] > 3 * found[case], (
            f"{case} must move the answers for this to say anything"
        )


def test_greedy_texts_agree_as_often_with_an_adapter_as_without(wanted, served):
    found = {case: agreement(wanted[case][2], served[case]) for case in GREEDY}
    for case, (share, whole) in found.items():
        print(
            f"\n{case}: {share:.1%} of greedy steps, {whole:.1%} of texts of {STEPS} tokens", end=""
        )
    for case in GREEDY:
        assert found[case][0] >= found["none"][0] - 0.05, case


def test_an_adapter_switched_off_leaves_the_bare_base_and_one_left_out_of_a_request_is_off(
    ask, served, prompts
):
    off = [{"id": number, "scale": 0.0} for number in (0, 1)]
    assert completion(ask, prompts[0], [off[0]])[0] == served["none"][0][0]
    assert completion(ask, prompts[0], [{"id": 1, "scale": 1.0}])[0] == served["b"][0][0]
    ask("/lora-adapters", off)
    assert completion(ask, prompts[0], None)[0] == served["none"][0][0]
    ask("/lora-adapters", [{"id": 0, "scale": 1.0}])
    assert completion(ask, prompts[0], None)[0] == served["a"][0][0]


def test_a_server_that_is_asked_tells_which_adapter_acts_and_at_which_scale(address, ask, adapters):
    """`verify --server`: PEFT is nearest at the scale that is set, however llama.cpp rounds."""
    for scale in (1.0, 0.5):
        ask("/lora-adapters", [{"id": number, "scale": scale} for number in (0, 1)])
        found = ask_server(address, adapters["a"][0], name="a", base="smollm2")
        print(
            f"\na set to {scale}: fitted {found.fitted_scale:.3f}, {found.fit:.4f} nats there, ",
            end="",
        )
        print(
            (
                f"{found.misfit:.3f} without the adapter; effect {found.effect:.3f}, noise "
                f"{found.noise:.1e}"
            ),
            end="",
        )
        assert (found.acts, found.set_scale, found.scaled_right) == (True, scale, True)
        # Measured: 0.964 and 0.478.
        assert found.fitted_scale == pytest.approx(scale, abs=0.15 * scale)
        assert found.fit < found.misfit / 3
