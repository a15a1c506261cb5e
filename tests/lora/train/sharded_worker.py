"""One of several processes that train a small adapted BERT, sharded over them (FSDP2).

`main` leaves, for every case of `CASES`, losses, gradients and figures of layers of each rank, and
the adapter as rank 0 saved it. `train` is also what one process alone does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from adapters_support import tiny_bert, token_batch
from peft import PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lsrdecomp.lora.peft import LsrConfig
from lsrdecomp.lora.train.callbacks import layer_figures

STEPS, ROWS = 2, 8
PATIENCE = timedelta(minutes=10)


@dataclass(frozen=True)
class Case:
    """What is adapted, and what is sharded beside the root."""

    name: str
    settings: dict[str, Any]
    dtype: torch.dtype = torch.float64
    blocks: bool = True
    recompute: bool = False


LINEAR = {"target_modules": ["query", "value", "dense"]}
CASES = (
    Case("float32", LINEAR, torch.float32),
    Case("blocks", LINEAR),
    Case("root", LINEAR, blocks=False),
    Case("recomputed", LINEAR, recompute=True),
    Case(
        "embedding-dora",
        {"target_modules": ["word_embeddings", "query", "dense"], "use_dora": True},
    ),
)


def adapted(case: Case) -> PeftModel:
    """A small BERT, its head trained beside the adapter, the same in every process."""
    base = tiny_bert()
    config = LsrConfig(
        r=4, separation_rank=2, init_weights=False, modules_to_save=["classifier"], **case.settings
    )
    model = get_peft_model(base, config).to(case.dtype).train()
    if case.recompute:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def train(model: nn.Module, rank: int = 0, processes: int = 1) -> Iterator[tuple[str, Tensor]]:
    """The loss of the whole batch and every gradient, whole, of each step."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.001)
    labels = torch.arange(ROWS) % 2
    mine = slice(rank * ROWS // processes, (rank + 1) * ROWS // processes)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = token_batch(ROWS, seed=step)["input_ids"][mine]
        loss = nn.functional.cross_entropy(model(input_ids=inputs).logits, labels[mine])
        loss.backward()
        total = loss.detach().clone()
        if processes > 1:
            dist.all_reduce(total)
        yield f"{step} loss", total / processes
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                yield (
                    f"{step} {name}",
                    getattr(parameter.grad, "full_tensor", parameter.grad.clone)(),
                )
        optimizer.step()


def main(rank: int, processes: int, folder: Path) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=processes, timeout=PATIENCE
    )
    try:
        mesh = init_device_mesh("cpu", (processes,))
        for case in CASES:
            model = adapted(case)
            for block in model.base_model.model.bert.encoder.layer if case.blocks else ():
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            save_file(
                dict(train(model, rank, processes)), folder / f"{case.name}.{rank}.safetensors"
            )
            (folder / f"{case.name}.{rank}.json").write_text(json.dumps(list(layer_figures(model))))
            state = get_model_state_dict(
                model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
            )
            if rank == 0:
                model.save_pretrained(str(folder / case.name), state_dict=state)
    finally:  # the other process hears of a failure at once
        dist.destroy_process_group()
