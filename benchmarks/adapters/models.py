"""Models whose linear layers the adapter benchmark adapts: stacks of bare layers, RoBERTa, blocks of Llama's sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.adapters.arms import Sizes

ATTENTION = ("query", "value")
ALL = ("query", "key", "value", "dense")
BLOCK = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Case:
    """One problem: which model, on how many tokens, with what adapted."""

    name: str
    kind: str  # stack, roberta, block
    tokens: tuple[int, int]  # sequences, length
    shapes: tuple[tuple[int, int], ...] = ()  # (out, into) of each layer of a stack
    names: tuple[str, ...] = ()
    width: int = 768
    depth: int = 12
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def count(self) -> int:
        return self.tokens[0] * self.tokens[1]


class Stack(nn.Module):
    """Linear layers beside each other, each with its own input."""

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"linear_{i}": nn.Linear(into, out) for i, (out, into) in enumerate(shapes)})

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [layer(x) for layer, x in zip(self.layers.values(), inputs, strict=True)]


class Blocks(nn.Module):
    """The linear layers of Llama's blocks, chained without attention."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        wide = round(width * 11008 / 4096)
        shapes = dict.fromkeys(BLOCK[:4], (width, width)) | dict.fromkeys(BLOCK[4:6], (wide, width))
        shapes["down_proj"] = (width, wide)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(into, out, bias=False) for name, (out, into) in shapes.items()})
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        for block in self.blocks:
            attended = block["o_proj"](block["q_proj"](x) + block["k_proj"](x) + block["v_proj"](x))
            x = x + attended
            x = x + block["down_proj"](nn.functional.silu(block["gate_proj"](x)) * block["up_proj"](x))
        return [x]


class Roberta(nn.Module):
    """RoBERTa's encoder with random weights, its embeddings' output made to require a gradient."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        from transformers import RobertaConfig, RobertaModel

        config = RobertaConfig(
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=max(1, width // 64),
            intermediate_size=4 * width,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=514,
            vocab_size=1000,
        )
        self.encoder = RobertaModel(config, add_pooling_layer=False)
        self.encoder.embeddings.register_forward_hook(lambda _, __, output: output.requires_grad_())

    def forward(self, tokens: Tensor) -> list[Tensor]:
        return [self.encoder(tokens).last_hidden_state]


def make(case: Case, device: torch.device, dtype: torch.dtype, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with device:  # the weights of a large model are drawn where they are needed
        if case.kind == "stack":
            model: nn.Module = Stack(case.shapes)
        elif case.kind == "roberta":
            model = Roberta(case.width, case.depth)
        else:
            model = Blocks(case.width, case.depth)
    return model.to(device=device, dtype=dtype)


def sample(case: Case, device: torch.device, dtype: torch.dtype, seed: int) -> tuple[Any, list[Tensor]]:
    """Fresh inputs and output gradients."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    if case.kind == "roberta":
        tokens = torch.randint(5, 1000, case.tokens, generator=generator, device=device)
        return [tokens], [normal(*case.tokens, case.width)]
    if case.kind == "block":
        return [normal(*case.tokens, case.width).requires_grad_()], [normal(*case.tokens, case.width)]
    inputs = [normal(*case.tokens, into).requires_grad_() for _, into in case.shapes]
    return inputs, [normal(*case.tokens, out) for out, _ in case.shapes]


def cases(cpu: bool, tiny: bool) -> list[Case]:
    """What to measure: quickly (``tiny``), on a CPU, or on a GPU."""
    llama = Sizes(rank=(4, 4), terms=8, lora_rank=16)
    if tiny:
        return [
            Case("stack", "stack", (2, 8), ((48, 48), (48, 48), (96, 48))),
            Case("roberta q,v", "roberta", (2, 8), names=ATTENTION, width=64, depth=2),
            Case("block", "block", (2, 8), names=BLOCK, width=32, depth=1, sizes=Sizes((2, 2), 2, 4)),
        ]
    square = ((768, 768),)
    if cpu:
        return [
            *(
                Case(f"768 x 768, {n} tokens", "stack", (n // 128, 128), square * layers)
                for n, layers in ((256, 8), (1024, 4), (4096, 1))
            ),
            Case("3072 x 768 and 768 x 3072, 1024 tokens", "stack", (8, 128), ((3072, 768), (768, 3072))),
            Case("4096 x 4096, 256 tokens", "stack", (2, 128), ((4096, 4096),), sizes=llama),
            Case("RoBERTa-base, 2 layers, q,v, 4 x 128", "roberta", (4, 128), names=ATTENTION, depth=2),
            Case("RoBERTa-base, 2 layers, all, 4 x 128", "roberta", (4, 128), names=ALL, depth=2),
        ]
    return [
        Case("RoBERTa-base, q,v, 256 x 128", "roberta", (256, 128), names=ATTENTION),
        Case("RoBERTa-base, all, 256 x 128", "roberta", (256, 128), names=ALL),
        Case("RoBERTa-base, q,v, 16 x 128", "roberta", (16, 128), names=ATTENTION),
        *(Case(f"768 x 768, {n} tokens", "stack", (n // 128, 128), square * 24) for n in (2048, 32768)),
        *(
            Case(
                f"two 7B blocks, {n} tokens", "block", (n // 1024, 1024), names=BLOCK, width=4096, depth=2, sizes=llama
            )
            for n in (2048, 8192)
        ),
    ]
