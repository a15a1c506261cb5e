"""Ways to write an adapter in a few kilobytes: each makes a `Rival` for a budget of bytes.

- LSR, SVD: what `lsrdecomp compress --bytes --storage auto` writes; SVD is the search without
  Kronecker shapes, terms of rank one in the layers that gain most.
- XS: cores k × l between the leading singular vectors of the base's weights (LoRA-XS,
  arXiv:2405.17604), begun at the projection of the LoRA in the Fisher norm, sizes shared out over
  the layers by one budget.
- Fisher core: the same between eigenvectors of the base's own Fisher factors, which were measured
  once on texts of other tasks.
- LoRAQuant (arXiv:2510.26690): the LoRA's own singular directions, the first of a layer in two or
  three bits, the next in one, trained through the rounding. What the budget does not reach is left
  out; the split is chosen in the Fisher norm.
- Rank one: a LoRA of rank one in four bits on as few layers, trained through the rounding as well:
  the first singular direction of those layers that do most in the Fisher norm.
- VeRA, Uni-LoRA, TinyLoRA, VB-LoRA, FourierFT: PEFT's, from PEFT's own start, at the largest size
  that fits.

Bytes are counted by one rule: all that is needed to open the adapter, in the tightest container
that we know. For LSR and SVD that is measured on the files (`bytes_to_open`). All others pay
`ENVELOPE`, half a byte a number, two bytes a scale with a scale a tensor, and an index: a bit a
layer where some are left out, and the choice that was made for each layer in as many bits as there
are choices. LoRAQuant's numbers take their own bits. VB-LoRA pays for its bank, and for each piece
of a matrix two indices into it and half a byte. Eigenvectors that several adapters would share are
not charged.
"""

from __future__ import annotations

import copy
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import (
    FourierFTConfig,
    PeftConfig,
    TinyLoraConfig,
    UniLoraConfig,
    VBLoRAConfig,
    VeraConfig,
    get_peft_model,
)
from torch import Tensor, nn

from benchmarks.language.subject import Subject
from lsrdecomp import compress
from lsrdecomp.errors import BudgetError
from lsrdecomp.formats.allocation import PartOptions, within_cost
from lsrdecomp.formats.number_formats import nearest_codes
from lsrdecomp.lora.base.base_model import Base
from lsrdecomp.lora.base.open_bases import load_base
from lsrdecomp.lora.compress.rewrite import rewrite
from lsrdecomp.lora.compress.variants import products_of
from lsrdecomp.lora.files.file_checks import bytes_to_open
from lsrdecomp.lora.files.statistics import read_statistics
from lsrdecomp.lora.files.writing import WEIGHTS
from lsrdecomp.lora.search import CompressionPlan
from lsrdecomp.lora.search.layers import layer_pair
from lsrdecomp.lora.search.plan import Search
from lsrdecomp.lora.train.distill_trainer import trainable_factors
from lsrdecomp.lora.train.factor_rounding import FactorRounding

Doubles = NDArray[np.float64]

ENVELOPE = 176
"""Bytes around numbers, scales and index: config, header, lengths and seal of an LSR directory of a
LoRA of SmolLM2 have 93, 69 and 14."""
DEFAULT_BITS = 4
CORE_SIDES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
"""Sides of a core."""
PIECE = 96
"""Numbers of one vector of VB-LoRA's bank: a divisor of the sides of the layers."""
SPLITS = [(high, low) for high in range(3) for low in range(5 - high)]
"""Directions of a layer that LoRAQuant writes in more bits and in one."""
LARGE = 60_000
"""Bytes of a large adapter: all are trained in float32, and LoRAQuant may write all directions of a
LoRA of rank 8, in `LARGE_SPLITS`."""
LARGE_SPLITS = [(high, low) for high in range(9) for low in range(9 - high)]
RANK_ONE_SPLITS = [(0, 0), (1, 0)]


class Rival(ABC):
    """An adapter that is trained and then stored.

    Attributes
    ----------
    model : nn.Module
        The base with the adapter on it.
    parameters : sequence of nn.Parameter
        What is trained.
    is_relative : bool
        Whether a step is in units of the root mean square of a parameter, as `distill` has it.
        Methods that begin at nothing or at noise take steps in plain numbers.
    """

    model: nn.Module
    parameters: Sequence[nn.Parameter]
    is_relative: bool = True

    def rounded(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters have the values that would be stored.

        Here they keep their own: LoRAQuant rounds in its forward pass, and the methods whose
        authors train plain numbers are rounded at the end.
        """
        return nullcontext()

    @abstractmethod
    def store(self, subject: Subject) -> Base:
        """Round the numbers as they are stored, and return the base with the stored adapter."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes that open the stored adapter."""

    @property
    def numbers(self) -> int:
        """Numbers that are trained."""
        return sum(parameter.numel() for parameter in self.parameters)


# -- LSR and truncated SVD, as this package writes them -------------------------------------------

COMPRESSED = {"LSR": Search(), "SVD": Search(orders=())}
"""Searches of the methods that `compress` makes."""


INDEX_MARGIN = 10
"""Bytes that are left free for an index that grows when trained factors are written, by 5 at most
in trials."""


class CompressedRival(Rival):
    """LSR or truncated SVD: a directory that `compress` wrote, and its trained copy."""

    def __init__(self, subject: Subject, method: str, budget: int, name: str) -> None:
        self.written = compressed(subject, method, budget)
        self.stored = subject.work / f"{method}-{budget}-{name}"
        student = load_base(subject.base, self.written)
        self.model = student.model
        self.parameters = trainable_factors(self.model)
        self.rounding = FactorRounding(student, self.written)

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """Round the factors as `distill` does, and take the rounding back at the end."""
        before = [parameter.detach().clone() for parameter in self.parameters]
        self.rounding()
        yield
        with torch.no_grad():
            for parameter, values in zip(self.parameters, before, strict=True):
                parameter.copy_(values)

    def store(self, subject: Subject) -> Base:
        """Write the trained factors, in the codes of the directory, and open what was written."""
        self.rounding()  # what was trained for is what is written
        products = products_of(replace(subject.source, model=self.model))
        shutil.rmtree(self.stored, ignore_errors=True)  # of a run that was stopped
        rewrite(
            self.stored,
            self.written,
            subject.checkpoint,
            products,
            statistics=subject.statistics,
        )
        return load_base(subject.base, self.stored)

    @property
    def bytes(self) -> int:
        """Bytes that open the directory."""
        return bytes_to_open(self.stored / WEIGHTS)


def compressed(subject: Subject, method: str, budget: int) -> Path:
    """Return the directory of LSR or SVD as `compress` writes it, made at the first call.

    Raises
    ------
    BudgetError
        If not even the smallest fits.
    """
    out = subject.work / f"{method}-{budget}"
    if not out.exists():
        plan = CompressionPlan(bytes=budget - INDEX_MARGIN, storage="auto")
        compress(
            subject.checkpoint, plan, statistics=subject.statistics, search=COMPRESSED[method]
        ).save(out, record=True)
    return out


# -- the others, whose bytes are counted ----------------------------------------------------------


class RoundedRival(Rival):
    """An adapter whose parameters are rounded in place, one scale a tensor.

    Parameters
    ----------
    model : nn.Module
    parameters : sequence of nn.Parameter
    bits : sequence of int, optional
        Of each parameter's numbers; absent, `DEFAULT_BITS`.
    index_bits : float
        Bits that say which layers there are, and their sizes.
    is_relative : bool
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        bits: Sequence[int] = (),
        *,
        index_bits: float = 0.0,
        is_relative: bool = True,
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.bits = bits or [DEFAULT_BITS] * len(parameters)
        self.index_bits = index_bits
        self.is_relative = is_relative

    @property
    def bytes(self) -> int:
        """Bytes by the rule of this module."""
        numbers = sum(tensor_bytes(p.numel(), bits) for p, bits in self._with_bits())
        return ENVELOPE + math.ceil(self.index_bits / 8) + numbers

    def round(self) -> None:
        """Round each parameter to its bits, with the scale of the least squared error."""
        with torch.no_grad():
            for parameter, bits in self._with_bits():
                parameter.copy_(rounded(parameter, bits))

    def store(self, subject: Subject) -> Base:
        """Round the numbers."""
        self.round()
        return replace(subject.source, model=self.model)

    def _with_bits(self) -> Iterator[tuple[nn.Parameter, int]]:
        return zip(self.parameters, self.bits, strict=True)


class VectorBank(RoundedRival):
    """VB-LoRA as its authors store it: the bank, and of each piece's logits the two largest."""

    @property
    def bank(self) -> nn.Parameter:
        """The vectors, (vectors, numbers of each)."""
        (bank,) = (parameter for parameter in self.parameters if parameter.ndim == 2)
        return bank

    @property
    def logits(self) -> list[nn.Parameter]:
        """The weights of the vectors in each piece, (r, pieces, vectors) a side of a layer."""
        return [parameter for parameter in self.parameters if parameter.ndim == 3]

    @property
    def pieces(self) -> int:
        """Pieces of all matrices together."""
        return sum(logits[..., 0].numel() for logits in self.logits)

    @property
    def numbers(self) -> int:
        """Numbers that are stored: the bank, and a weight a piece."""
        return self.bank.numel() + self.pieces

    @property
    def bytes(self) -> int:
        """Bytes by the rule of this module."""
        bits_of_place = (len(self.bank) - 1).bit_length()
        bits_of_pieces = self.pieces * (2 * bits_of_place + DEFAULT_BITS)
        bank_bytes = tensor_bytes(self.bank.numel(), DEFAULT_BITS)
        return ENVELOPE + math.ceil((self.index_bits + bits_of_pieces) / 8) + bank_bytes

    def round(self) -> None:
        """Round the bank; of each two weights the larger becomes one of sixteen from ½ to 1."""
        with torch.no_grad():
            self.bank.copy_(rounded(self.bank, DEFAULT_BITS))
            for logits in self.logits:
                largest, places = logits.topk(2, dim=-1)
                weight = largest.softmax(-1)[..., :1]
                step = ((weight - 0.5) * 32).floor().clamp(0, 15)
                weight = 0.5 + step / 32 + 1 / 64
                both = torch.cat([weight, 1 - weight], dim=-1)
                logits.fill_(-1e4).scatter_(-1, places, both.log())


def tensor_bytes(numbers: int, bits: int) -> int:
    """Return the bytes of a tensor in so many bits a number, with its scale."""
    return math.ceil(numbers * bits / 8) + 2


def rounded(values: Tensor, bits: int) -> Tensor:
    """Return values rounded to so many bits, with one scale for all; one bit is a sign."""
    if bits == 1:
        return values.sign() * values.abs().mean()
    numbers = values.detach().double().numpy().reshape(1, -1)
    codes, step = nearest_codes(numbers, bits)
    return torch.from_numpy(codes * step[:, None]).reshape(values.shape).to(values)


def index_bits(n_layers: int, n_used: int, n_choices: int) -> float:
    """Return the bits that say which layers are used, and which of some choices each takes."""
    which = n_layers if n_used < n_layers else 0
    return which + n_used * math.log2(n_choices)


# -- cores between fixed bases --------------------------------------------------------------------

Directions = Mapping[str, tuple[Doubles, Doubles]]
"""Columns on the output side and on the input side of each layer."""


def cores(subject: Subject, directions: Directions, budget: int) -> RoundedRival:
    """Build ΔW = U θ Vᵀ in each layer, θ projected in the Fisher norm, under one budget."""
    layers = {layer.name: layer for layer in subject.checkpoint.layers}
    shapes = [(k, n) for k in CORE_SIDES for n in CORE_SIDES]
    options: list[PartOptions] = []
    projections: list[tuple[Doubles, Doubles, Doubles]] = []
    # 1. Project each layer's ΔW; a core of any shape is a block of the projection.
    for name in subject.modules:
        pair = layer_pair(subject.checkpoint, layers[name])
        u, v = directions[name]
        norms = subject.statistics[name]
        left_root = np.asarray(norms.output.root(np.eye(norms.output.size)))
        right_root = np.asarray(norms.input.root(np.eye(norms.input.size)))
        delta = np.asarray(pair.left, float) @ np.asarray(pair.right, float)
        target = left_root @ delta @ right_root.T
        q, r = np.linalg.qr(left_root @ u)
        p, s = np.linalg.qr(right_root @ v)
        projected = q.T @ target @ p
        projections.append((projected, r, s))
        squared_norm = float((target**2).sum())
        costs = [0.0]
        losses = [squared_norm]
        for k, n in shapes:
            costs.append(tensor_bytes(k * n, DEFAULT_BITS) + math.log2(len(shapes)) / 8)
            losses.append(max(0.0, squared_norm - float((projected[:k, :n] ** 2).sum())))
        options.append(PartOptions.of(costs, losses))
    # 2. Choose the shapes.
    n_layers = len(subject.modules)
    choices = within_cost(options, budget - ENVELOPE - math.ceil(n_layers / 8))
    # 3. Put the chosen cores on a copy of the base.
    model = copy.deepcopy(subject.plain)
    parameters: list[nn.Parameter] = []
    for name, choice, (projected, r, s) in zip(subject.modules, choices, projections, strict=True):
        if choice == 0:
            continue
        k, n = shapes[choice - 1]
        core = np.linalg.solve(s[:n, :n], projected[:k, :n].T).T
        core = np.linalg.solve(r[:k, :k], core)
        parameter = nn.Parameter(torch.tensor(core, dtype=torch.float32))
        u, v = directions[name]
        hook = _core_hook(parameter, _single(u[:, :k]), _single(v[:, :n]))
        model.get_submodule(name).register_forward_hook(hook)
        parameters.append(parameter)
    bits = index_bits(n_layers, len(parameters), len(shapes))
    return RoundedRival(model, parameters, index_bits=bits)


def _single(values: Doubles) -> Tensor:
    return torch.tensor(values.copy(), dtype=torch.float32)


def _core_hook(core: nn.Parameter, u: Tensor, v: Tensor) -> Callable[..., Tensor]:
    return lambda module, inputs, output: output + inputs[0] @ v @ core.T @ u.T


def singular_vectors(subject: Subject) -> Directions:
    """Return U diag(σ) and V of each weight of the base, the leading columns."""
    vectors: dict[str, tuple[Doubles, Doubles]] = {}
    n_columns = max(CORE_SIDES)
    for name in subject.modules:
        weight: Any = subject.plain.get_submodule(name).weight
        u, sigma, vh = np.linalg.svd(weight.detach().double().numpy(), full_matrices=False)
        relative = sigma[:n_columns] / sigma[0]
        vectors[name] = (u[:, :n_columns] * relative, vh[:n_columns].T)
    return vectors


def eigenvectors(subject: Subject) -> Directions:
    """Return G^-½ and C^-½ in the leading eigenvectors of the base's own Fisher factors."""
    statistics = read_statistics(subject.base_statistics)
    n_columns = max(CORE_SIDES)

    def whitened(side: Any) -> Doubles:
        basis = np.asarray(side.basis)[:, :n_columns]
        values = np.asarray(side.values)[:n_columns]
        return np.asarray(basis * np.sqrt(values[0] / values), dtype=float)

    vectors: dict[str, tuple[Doubles, Doubles]] = {}
    for name in subject.modules:
        norms = statistics[name]
        vectors[name] = (whitened(norms.output), whitened(norms.input))
    return vectors


# -- the LoRA's own directions in few bits --------------------------------------------------------


@dataclass(frozen=True)
class SplitLayer:
    """Directions of a layer, and the bits of each."""

    name: str
    bits: list[int]
    columns: Doubles  # (directions, m)
    rows: Doubles  # (directions, n)


def own_directions(
    subject: Subject,
    budget: int,
    splits: Sequence[tuple[int, int]],
    bits_of_first: Sequence[int],
) -> RoundedRival:
    """Quantize U √Σ and √Σ Vᵀ: first directions in the bits that lose least, the next in one.

    Raises
    ------
    BudgetError
        If no direction fits.
    """
    # 1. Choose the bits of the first directions, and how many directions each layer has.
    n_layers = len(subject.modules)
    available = budget - ENVELOPE - math.ceil(n_layers / 8)
    losses_and_layers = [_split(subject, available, splits, high) for high in bits_of_first]
    _, layers = min(losses_and_layers, key=lambda each: each[0])
    if not layers:
        raise BudgetError(f"no direction fits in {budget} bytes")
    # 2. Put them on a copy of the base, trained through the rounding.
    model = copy.deepcopy(subject.plain)
    parameters: list[nn.Parameter] = []
    bits: list[int] = []
    for layer in layers:
        n_directions = len(layer.bits)
        columns = [nn.Parameter(_single(vector)) for vector in layer.columns[:n_directions]]
        rows = [nn.Parameter(_single(vector)) for vector in layer.rows[:n_directions]]
        hook = rounded_hook(columns, rows, layer.bits)
        model.get_submodule(layer.name).register_forward_hook(hook)
        parameters += columns + rows
        bits += layer.bits * 2
    in_index = index_bits(n_layers, len(layers), len(splits))
    return RoundedRival(model, parameters, bits, index_bits=in_index)


def _split(
    subject: Subject, available: float, splits: Sequence[tuple[int, int]], high: int
) -> tuple[float, list[SplitLayer]]:
    """Return the loss in the Fisher norm, and the layers that are used."""
    options: list[PartOptions] = []
    sides: list[tuple[Doubles, Doubles]] = []
    for layer in subject.checkpoint.layers:
        pair = layer_pair(subject.checkpoint, layer)
        norms = subject.statistics[layer.name]
        # 1. Columns U √Σ and rows √Σ Vᵀ of ΔW.
        q, r = np.linalg.qr(np.asarray(pair.left, float))
        p, s = np.linalg.qr(np.asarray(pair.right, float).T)
        u, sigma, vh = np.linalg.svd(r @ s.T)
        columns = (q @ u * np.sqrt(sigma)).T
        rows = (p @ vh.T * np.sqrt(sigma)).T
        # 2. Cost and loss of each split.
        target = _in_norm(columns, rows, norms)
        costs: list[float] = []
        losses: list[float] = []
        for n_high, n_low in splits:
            bits = [high] * n_high + [1] * n_low
            coded = _in_norm(_coded(columns, bits), _coded(rows, bits), norms)
            losses.append(float(np.square(target - coded).sum()))
            costs.append(_cost(columns, rows, bits) + math.log2(len(splits)) / 8)
        options.append(PartOptions.of(costs, losses))
        sides.append((columns, rows))
    choices = within_cost(options, available)
    used: list[SplitLayer] = []
    loss = 0.0
    for layer, (columns, rows), choice, option in zip(
        subject.checkpoint.layers, sides, choices, options, strict=True
    ):
        loss += float(option.losses[choice])
        n_high, n_low = splits[choice]
        if n_high + n_low:
            used.append(SplitLayer(layer.name, [high] * n_high + [1] * n_low, columns, rows))
    return loss, used


def _coded(vectors: Doubles, bits: Sequence[int]) -> Doubles:
    """Return the first vectors, each rounded to its bits."""
    coded = np.zeros((len(bits), vectors.shape[1]))
    for place, n_bits in enumerate(bits):
        coded[place] = rounded(torch.tensor(vectors[place]), n_bits).numpy()
    return coded


def _in_norm(columns: Doubles, rows: Doubles, norms: Any) -> Doubles:
    """Return G^½ ΔW C^½ of columns and rows."""
    left = norms.output.root(columns.T)
    right = norms.input.root(rows.T)
    return np.asarray(left @ right.T)


def _cost(columns: Doubles, rows: Doubles, bits: Sequence[int]) -> float:
    """Return the bytes of directions in so many bits."""
    m, n = columns.shape[1], rows.shape[1]
    return float(sum(tensor_bytes(m, each) + tensor_bytes(n, each) for each in bits))


def rounded_hook(
    columns: Sequence[Tensor], rows: Sequence[Tensor], bits: Sequence[int]
) -> Callable[..., Tensor]:
    """Return a hook that adds the product of rounded columns and rows to a layer's output.

    The gradient passes the rounding as if it were not there.
    """

    def coded(vectors: Sequence[Tensor]) -> Tensor:
        parts: list[Tensor] = []
        for vector, n_bits in zip(vectors, bits, strict=True):
            parts.append(vector + (rounded(vector, n_bits) - vector).detach())
        return torch.stack(parts)

    return lambda module, inputs, output: output + inputs[0] @ coded(rows).T @ coded(columns)


# -- PEFT's methods -------------------------------------------------------------------------------

MakeConfig = Callable[[int, list[str]], PeftConfig]
"""From a size and the names of layers to PEFT's config."""

PEFT_CONFIGS: dict[str, MakeConfig] = {
    "VeRA": lambda size, names: VeraConfig(r=size, target_modules=names, save_projection=False),
    "Uni-LoRA": lambda size, names: UniLoraConfig(r=4, theta_d_length=size, target_modules=names),
    "TinyLoRA": lambda size, names: TinyLoraConfig(r=8, u=size, target_modules=names),
    "FourierFT": lambda size, names: FourierFTConfig(n_frequency=size, target_modules=names),
    "VB-LoRA": lambda size, names: VBLoRAConfig(
        r=1, num_vectors=size + 1, vector_length=PIECE, topk=2, target_modules=names
    ),
}


def from_peft(subject: Subject, method: str, budget: int, seed: int) -> RoundedRival:
    """Make PEFT's own method at the largest size that fits, on the layers that matter most.

    Raises
    ------
    BudgetError
        If nothing fits.
    """
    names = by_energy(subject)
    n_used = len(names)
    while n_used:
        make = partial(_peft_rival, subject, method, names[:n_used], seed)
        # 1. Numbers are linear in the size.
        smallest = make(1)
        numbers_per_size = make(2).numbers - smallest.numbers
        size = 1 + int(2 * (budget - smallest.bytes) / numbers_per_size)
        # 2. The bytes are nearly so.
        while size > 0:
            rival = make(size)
            if rival.bytes <= budget:
                return rival
            size -= 1
        n_used //= 2
    raise BudgetError(f"nothing of {method} fits in {budget} bytes")


def _peft_rival(
    subject: Subject, method: str, names: list[str], seed: int, size: int
) -> RoundedRival:
    torch.manual_seed(seed)
    config = PEFT_CONFIGS[method](size, names)
    model: nn.Module = get_peft_model(copy.deepcopy(subject.plain), config)
    model = model.eval()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    bits = index_bits(len(subject.modules), len(names), 1)
    kind = VectorBank if method == "VB-LoRA" else RoundedRival
    return kind(model, parameters, index_bits=bits, is_relative=False)


def by_energy(subject: Subject) -> list[str]:
    """Return the names of the layers, those first in which the LoRA does most."""
    energies: dict[str, float] = {}
    for layer in subject.checkpoint.layers:
        pair = layer_pair(subject.checkpoint, layer)
        columns = np.asarray(pair.left, float).T
        rows = np.asarray(pair.right, float)
        in_norm = _in_norm(columns, rows, subject.statistics[layer.name])
        energies[layer.name] = float(np.linalg.norm(in_norm))
    return sorted(energies, key=lambda name: -energies[name])


# -- all of them ----------------------------------------------------------------------------------

METHODS = (*COMPRESSED, "Fisher core", "XS", "LoRAQuant", "Rank one", *PEFT_CONFIGS)


def make_rival(subject: Subject, method: str, budget: int, seed: int, name: str) -> Rival:
    """Make the adapter of a method that fits into a budget.

    Parameters
    ----------
    subject : Subject
    method : str
        One of `METHODS`.
    budget : int
        Bytes.
    seed : int
        Of what begins at noise.
    name : str
        Names the training among those of this method and budget.

    Raises
    ------
    BudgetError
        If nothing fits.
    """
    if method in COMPRESSED:
        return CompressedRival(subject, method, budget, name)
    if method == "Fisher core":
        return cores(subject, eigenvectors(subject), budget)
    if method == "XS":
        return cores(subject, singular_vectors(subject), budget)
    if method == "LoRAQuant":
        splits = SPLITS if budget < LARGE else LARGE_SPLITS
        return own_directions(subject, budget, splits, (2, 3))
    if method == "Rank one":
        return own_directions(subject, budget, RANK_ONE_SPLITS, (4,))
    return from_peft(subject, method, budget, seed)
