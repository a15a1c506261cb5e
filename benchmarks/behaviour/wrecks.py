"""What `measure` says of outputs that people get of one LoRA: sound ones, and wrecks.

    python -m benchmarks.behaviour.wrecks TASKS/e2e/held.jsonl --lora LORA --work DIRECTORY

`benchmarks.language.tasks` writes TASKS. Each row has a verdict, the codes of the reasons, the
share kept with its standard error, equal whole answers, and right ones of base, LoRA and output.
Rows are added as they come; those that are there stay. One thread.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import lsrdecomp as lsr
from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp.lora.base import find_base
from lsrdecomp.lora.base.base_files import packaged_file
from lsrdecomp.lora.compress import export_lora
from lsrdecomp.lora.files import read_base
from lsrdecomp.lora.search.layers import layer_pair

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Row = dict[str, Any]


def main() -> None:
    """Make the rows that are not there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--lora", type=Path, required=True)
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--out", type=Path, default=RESULTS / "wrecks.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    texts = arguments.work / arguments.data.name
    arguments.work.mkdir(parents=True, exist_ok=True)
    lines = arguments.data.read_text(encoding="utf-8").splitlines()[: arguments.texts]
    texts.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for name in arguments.only or OUTPUTS:
        record: dict[str, Any] = {"rows": []} | records.load(arguments.out)
        if any(row["output"] == name for row in record["rows"]):
            continue
        folder = arguments.work / name.replace(" ", "-")
        if not folder.exists():
            OUTPUTS[name](arguments.lora, find_base(arguments.base), folder)
        began = time.process_time()
        found = lsr.measure(arguments.lora, folder, base=arguments.base, data=texts)
        row = {"output": name, **row_of(found), "seconds": round(time.process_time() - began, 1)}
        print(row, flush=True)
        rows = [*record["rows"], row]
        packages = ("torch", "transformers", "peft")
        records.save(arguments.out, {**record, "rows": rows}, *packages, seed=0)


def row_of(found: Any) -> Row:
    """Return the figures of a comparison."""
    fidelity = found.fidelity
    return {
        "kind": found.kind,
        "verdict": found.verdict,
        "reasons": [reason.code for reason in found.reasons],
        "sentence": found.sentence(),
        "first_reason": found.reasons[0].sentence if found.reasons else None,
        "coverage": found.coverage,
        "weight_error": found.weight_error,
        "kept": fidelity.kept,
        "standard_error": fidelity.standard_error,
        "agreement": fidelity.agreement,
        "all_along": fidelity.exact_match_rate,
        "alike": fidelity.n_matching,
        "answered": fidelity.answered,
        "right": fidelity.right,
    }


def adapter(
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda tensors: tensors, **fields: Any
) -> Callable[[Path, str, Path], None]:
    """Return a function that copies the LoRA with other tensors, or other fields of its config."""

    def write(lora: Path, _base: str, out: Path) -> None:
        shutil.copytree(lora, out)
        save_file(change(load_file(out / WEIGHTS)), out / WEIGHTS)
        config = json.loads((out / CONFIG).read_text())
        changed = {name: value(config) for name, value in fields.items()}
        (out / CONFIG).write_text(json.dumps({**config, **changed}))

    return write


def merged(
    times: float = 1.0, dtype: torch.dtype = torch.float32, **quantization: Any
) -> Callable[[Path, str, Path], None]:
    """Return a function that adds the LoRA to the base, and saves it in few bits or many."""

    def write(lora: Path, base: str, out: Path) -> None:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), lora)
        for module in model.modules():
            if hasattr(module, "scale_layer"):
                module.scale_layer(times)
        whole = model.merge_and_unload().to(dtype)
        if quantization:
            from transformers import BitsAndBytesConfig

            part = out.with_name(f"{out.name}-whole")
            whole.save_pretrained(part)
            config = BitsAndBytesConfig(**quantization)
            whole = AutoModelForCausalLM.from_pretrained(part, quantization_config=config)
        whole.save_pretrained(out)
        AutoTokenizer.from_pretrained(base).save_pretrained(out)

    return write


def without_half(tensors: dict[str, Any]) -> dict[str, Any]:
    """Leave out the LoRA of the upper half of the layers."""
    return {
        key: value
        for key, value in tensors.items()
        if int(key.split("layers.")[1][:2].strip(".")) < 15
    }


def compressed(**goal: Any) -> Callable[[Path, str, Path], None]:
    """Return a function that compresses the LoRA."""

    def write(lora: Path, _base: str, out: Path) -> None:
        lsr.compress(lora, **goal).save(out)

    return write


def exported(lora: Path, _base: str, out: Path) -> None:
    """Write the LoRA in the form of all servers, in float16."""
    export_lora(lsr.open_checkpoint(lora), out, storage="float16", profile="common")


def merged_gguf(lora: Path, _base: str, out: Path) -> None:
    """Add the LoRA to the GGUF file of SmolLM2, whose matrices stay in its four bits."""
    import gguf

    reader = gguf.GGUFReader(packaged_file())
    deltas = dict(gguf_deltas(lora))
    out.mkdir()
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out / "merged.gguf", architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        types = [*field.types, None]
        writer.add_key_value(name, field.contents(), types[0], types[1])
    for tensor in reader.tensors:
        data = tensor.data
        if tensor.name in deltas:
            weight = gguf.quants.dequantize(data, tensor.tensor_type) + deltas[tensor.name]
            data = gguf.quants.quantize(weight.astype("float32"), tensor.tensor_type)
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_deltas(lora: Path) -> Iterator[tuple[str, Any]]:
    """Yield ΔW by the names of a GGUF file, rows of q and k in its order."""
    checkpoint = lsr.open_checkpoint(lora)
    base = read_base(packaged_file())
    heads = {"attn_q": 9, "attn_k": 3}
    for layer in checkpoint.layers:
        delta = layer_pair(checkpoint, layer).to_matrix()
        name = str(base.find(layer.name))
        count = heads.get(name.rpartition(".")[2])
        if count is not None:
            rows = delta.reshape(count, 2, -1, delta.shape[1])
            delta = rows.swapaxes(1, 2).reshape(delta.shape)
        yield f"{name}.weight", delta


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
OUTPUTS = {
    "export in float16": exported,
    "merged in bfloat16": merged(dtype=torch.bfloat16),
    "int4": compressed(bytes=480_000),
    "energy 0.9": compressed(energy=0.9),
    "alpha ignored": adapter(lora_alpha=lambda config: config["r"]),
    "half of the layers": adapter(without_half),
    "merged twice": merged(times=2.0),
    "merged in int8": merged(load_in_8bit=True),
    "merged in NF4": merged(**NF4),
    "merged in Q4_1": merged_gguf,
}


if __name__ == "__main__":
    main()
