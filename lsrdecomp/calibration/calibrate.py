"""Calibration: the K-FAC statistics of a base's Linear layers, measured on data in one resumable stream.

For a layer y = M x, let x_t be its input at token t and g_t = ∂ log p(ŷ)/∂y_t for an answer ŷ drawn from the model
itself. A change D of M changes the model's answer distribution by, to second order,

    KL(p_M ‖ p_(M+D)) ≈ ½ E[⟨W, D⟩²],  W = Σ_t g_t x_tᵀ,

in nats per example (per predicted token for language models), and a Kronecker-factored approximation [1]_ replaces the
expectation by two small matrices, ½ ‖G^½ D C^½‖_F². Here

    G ∝ E[W Wᵀ],  C ∝ E[Wᵀ W],  tr G · tr C = E‖W‖_F²,

one step of the power iteration that leads to the nearest Kronecker product of the true Fisher matrix E[vec W vec Wᵀ]
[2]_. The textbook's G ∝ E[g gᵀ] and C = E[x xᵀ] treat the tokens of an example as independent; they are not, and an
adapter's change acts on all of them alike. Since the trace is exact, half the squared norm has the right expectation
for a random D of independent entries, and layers can be compared. The scale is shared out so that tr C = E‖x_t‖².

.. [1] J. Martens and R. Grosse, Optimizing neural networks with Kronecker-factored approximate curvature, 2015.
.. [2] D. Morwani et al., A new perspective on Shampoo's preconditioner, 2024.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lsrdecomp.calibration.accumulators import Counts, LayerSums
from lsrdecomp.calibration.answers import ask
from lsrdecomp.calibration.base_model import Base
from lsrdecomp.calibration.divergence import divergences, without_delta
from lsrdecomp.calibration.files import check_unfinished, read_partial, write_partial, write_statistics
from lsrdecomp.calibration.fisher import Head, Pairs, sampled_answers, watched
from lsrdecomp.calibration.questions import TOKEN_HEADS, Batch, CalibrationError


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a calibration is, given to ``on_batch`` after every batch."""

    batches: int
    examples: int
    answers: int
    samples: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a calibration did.

    ``answers`` counts what one KL divergence is about: examples, or predicted tokens for language models. ``effect`` is
    KL(adapter ‖ no adapter) per answer; None for a model without an adapter.
    """

    directory: Path
    examples: int
    answers: int
    modules: tuple[str, ...]
    effect: float | None = None


def calibrate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    modules: Sequence[str],
    out: str | Path,
    seed: int,
    samples: int,
    head: Head = Head.classification,
    base: str = "",
    adapter_base: str = "",
    adapter: str = "",
    max_full: int = 1024,
    rank: int = 128,
    save_every: int = 50,
    on_batch: Callable[[Progress], None] | None = None,
) -> Calibration:
    """Measure the statistics of ``modules`` on batches of inputs and write them to the directory ``out``.

    The model is put into evaluation mode, without gradient checkpointing, for the time of the call; no parameter of it
    changes. Every ``save_every`` batches the sums are saved in ``out``: the same call with the same batches goes on
    from there, with the same result as an uninterrupted one.

    Parameters
    ----------
    model : torch.nn.Module
        Called as ``model(**model_inputs(batch)).logits``, with the adapter active whose compression is planned; a PEFT
        model will do.
    batches : iterable of mappings
        What the model is called with. ``attention_mask`` (``decoder_attention_mask`` or ``labels`` for seq2seq), where
        given, tells which tokens are real.
    modules : sequence of str
        Names of Linear layers as in the plain base.
    out : path
        Directory to write `statistics.json` and `statistics.safetensors` to; made if need be.
    seed : int
        Of the drawn answers and of the random block for large layers.
    samples : int
        Examples to use; the batch that reaches the number is used whole.
    head : Head
        What the logits mean.
    base : str
        Name of the base, kept in the metadata.
    adapter_base : str
        What the adapter's config calls its base, kept in the metadata: adapters of another are refused.
    adapter : str
        SHA-256 of the weight file of the active LoRA, so that `compress` knows whether ``effect`` is of what it makes
        smaller.
    max_full : int
        Layers up to this size add up a whole covariance, larger ones its action on 2·``rank`` random columns.
    rank : int
        Leading eigenpairs that are written, in half precision; the others count as equal.
    on_batch : callable, optional
        Called with a `Progress` after every batch.

    Returns
    -------
    Calibration

    Raises
    ------
    CalibrationError
        If a module is unknown, if there were no batches, or if no answer depends on a module.
    CheckpointError
        If ``out`` holds finished statistics, or the sums of a run with other settings.
    ShapeError
        If logits or a module's inputs do not fit the examples.

    Notes
    -----
    Costs one forward and one backward pass per batch, and one forward pass without the adapter; O(n²) memory per small
    layer, O(n·rank) per large one. Of a causal model only the positions that count reach the output layer.
    """
    out = Path(out)
    found = modules_by_name(model)
    missing = [name for name in modules if name not in found]
    if missing or not modules:
        some = ", ".join(name for name in found if name)[:200]
        raise CalibrationError(f"{', '.join(missing[:5]) or 'no module'}: not in the model, which has {some}, …")
    device = next(model.parameters()).device
    layers = {
        name: LayerSums(layer_size(found[name], name), max_full=max_full, rank=rank, seed=seed, device=device)
        for name in modules
    }
    settings = {"modules": list(modules), "seed": seed, "samples": samples, "head": head.name, "base": base}
    settings |= {"max_full": max_full, "rank": rank, "per": "token" if head in TOKEN_HEADS else "example"}
    settings |= {"adapter_base": adapter_base, "adapter": adapter}
    check_unfinished(out)
    counts = read_partial(out, settings, layers)

    texts, asked = hashlib.sha256(), Base(base, model, None, head, tuple(modules))
    adapted = hasattr(model, "get_base_model")

    def add(name: str, pairs: Pairs) -> None:
        layers[name].add(pairs)

    with _measuring(model), watched({name: found[name] for name in modules}, add) as record:
        for done, batch in enumerate(batches, start=1):
            if counts.examples >= samples and done > counts.batches:
                break
            texts.update(_content(batch))
            if done <= counts.batches:
                continue
            record.clear()
            answers = ask(asked, batch)
            moved = _effect(asked, batch, answers.logits) if adapted else 0.0
            generator = torch.Generator().manual_seed((seed << 32) + done)
            examples = len(answers.counts)
            record.backward(sampled_answers(answers.logits, head, generator), examples)
            counts = Counts(
                done, counts.examples + examples, counts.answers + len(answers.logits), counts.effect + moved
            )
            del answers
            if done % save_every == 0:
                write_partial(out, settings, layers, counts)
            if on_batch is not None:
                on_batch(Progress(counts.batches, counts.examples, counts.answers, samples))
    if counts.answers == 0:
        raise CalibrationError("no batches, or no answers in them: there is nothing to calibrate on")
    idle = [name for name, sums in layers.items() if sums.tokens == 0]
    if idle:
        raise CalibrationError(
            f"{', '.join(idle[:5])}: no answer of the model depends on it; leave it out of `modules`"
        )
    effect = counts.effect / counts.answers if adapted else None
    write_statistics(out, settings | {"texts": texts.hexdigest(), "effect": effect}, layers, counts)
    return Calibration(out, counts.examples, counts.answers, tuple(modules), effect)


def _content(batch: Batch) -> bytes:
    """What is read, as bytes, so that statistics can say which texts they are of."""
    return b"".join(
        batch[name].cpu().numpy().tobytes() for name in sorted(batch) if not batch[name].is_floating_point()
    )


def _effect(asked: Base, batch: Batch, logits: Tensor) -> float:
    """Σ KL(adapter ‖ no adapter) over the answers of a batch."""
    with torch.no_grad(), without_delta(asked.model):
        bare = ask(asked, batch).logits
        return float(divergences(logits.detach(), bare, asked.head).sum())


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Modules under the names they have in the plain base, all names of a shared one; PEFT's wrapping is undone."""
    base: nn.Module = getattr(model, "get_base_model", lambda: model)()
    return dict(base.named_modules(remove_duplicate=False))


def layer_size(module: nn.Module, name: str) -> tuple[int, int]:
    """(m, n) of a Linear layer, GPT-2's Conv1D or an adapter's wrapping of either."""
    plain: nn.Module = getattr(module, "get_base_layer", lambda: module)()
    if isinstance(plain, nn.Linear):
        return plain.out_features, plain.in_features
    weight = getattr(plain, "weight", None)
    if type(plain).__name__ == "Conv1D" and isinstance(weight, Tensor):
        return weight.shape[1], weight.shape[0]
    raise CalibrationError(f"{name} is a {type(plain).__name__}; statistics are for Linear layers")


@contextmanager
def _measuring(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, frozen parameters and no gradient checkpointing inside; everything as it was afterwards."""
    training = {module: module.training for module in model.modules()}
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    checkpointing = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    model.eval()
    try:
        for parameter in learning:
            parameter.requires_grad_(False)
        for module in checkpointing:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        with torch.enable_grad():
            yield
    finally:
        for module in checkpointing:
            module.gradient_checkpointing = True  # type: ignore[assignment]
        for parameter in learning:
            parameter.requires_grad_(True)
        for module, mode in training.items():
            module.training = mode
