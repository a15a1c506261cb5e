"""Calibration: the Fisher statistics of a base's Linear layers, measured on data in one resumable stream.

For a layer y = M x, let x_t be its input at token t and g_t = ∂ log p(ŷ)/∂y_t for an answer ŷ drawn
from the model itself. A change D of M changes the model's answer distribution by, to second order,

    KL(p_M ‖ p_(M+D)) ≈ ½ E[⟨W, D⟩²],  W = Σ_t g_t x_tᵀ,

in nats per example (per predicted token for language models), and a Kronecker-factored
approximation [1]_ replaces the expectation by two small matrices, ½ ‖G^½ D C^½‖_F². Here

    G ∝ E[W Wᵀ],  C ∝ E[Wᵀ W],  tr G · tr C = E‖W‖_F²,

one step of the power iteration that leads to the nearest Kronecker product of the true Fisher
matrix E[vec W vec Wᵀ] [2]_. The textbook's G ∝ E[g gᵀ] and C = E[x xᵀ] treat the tokens of an
example as independent; they are not, and an adapter's change acts on all of them alike. Since the
trace is exact, half the squared norm has the right expectation for a random D of independent
entries, and layers can be compared. The scale is shared out so that tr C = E‖x_t‖².

.. [1] J. Martens and R. Grosse, Optimizing neural networks with Kronecker-factored approximate
       curvature, 2015.
.. [2] D. Morwani et al., A new perspective on Shampoo's preconditioner, 2024.
"""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lsrdecomp.calibration.accumulators import Counts, LayerSums, in_groups
from lsrdecomp.calibration.divergence import divergences, without_delta
from lsrdecomp.calibration.errors import CalibrationError
from lsrdecomp.calibration.experts import least_reached
from lsrdecomp.calibration.files import (
    check_unfinished,
    leading_eigenpairs,
    load_sums,
    save_sums,
    write_statistics,
)
from lsrdecomp.calibration.forward import BatchLogits, forward, output_layer, predictions_at_a_time
from lsrdecomp.calibration.gradients import sampled_log_likelihood, watched
from lsrdecomp.calibration.heads import TOKEN_HEADS, Batch
from lsrdecomp.calibration.measured_model import layer_size, measuring, modules_by_name, recomputed
from lsrdecomp.checkpoints import Journal, content_key
from lsrdecomp.checkpoints.progress import OnStep, ProgressUpdate
from lsrdecomp.checkpoints.statistics import Statistics, read_statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from lsrdecomp.calibration.base_model import Base


def calibrate(
    base: Base,
    batches: Iterable[Batch],
    *,
    out: str | Path,
    seed: int,
    samples: int,
    max_full: int = 1024,
    rank: int = 128,
    checkpointing: bool = True,
    effect: bool = True,
    max_memory: int | None = None,
    save_every: int = 50,
    on_step: OnStep | None = None,
) -> Statistics:
    """Measure the statistics of a base's ``modules`` on batches of inputs and write them to the directory ``out``.

    The model is put into evaluation mode for the time of the call; no parameter of it changes.
    Every ``save_every`` batches the sums are saved in the journal beside ``out``: the same call
    with the same batches goes on from there, with the same result as an uninterrupted one.

    Parameters
    ----------
    base : Base
        As `load_base` opens it, or any model with the names of Linear layers in it and the `Head`
        that says what its logits mean. Called as ``base.model(**model_inputs(batch)).logits``, with
        the adapter active whose compression is planned. Its names and digest are kept in the
        metadata: adapters of another base are refused, and `compress` knows whether ``effect`` is
        of what it makes smaller.
    batches : iterable of mappings
        What the model is called with. ``attention_mask`` (``decoder_attention_mask`` or ``labels``
        for seq2seq), where given, tells which tokens are real.
    out : path
        Directory to write `statistics.json` and `statistics.safetensors` to; made if need be.
    seed : int
        Of the drawn answers and of the random block for large layers.
    samples : int
        Examples to use; the batch that reaches the number is used whole.
    max_full : int
        Layers up to this size add up a whole covariance, larger ones its action on 2·``rank``
        random columns.
    rank : int
        Leading eigenpairs that are written, in half precision; the others count as equal.
    checkpointing : bool
        Keep no activations inside the blocks of a transformers model and compute them again on the
        way back: another forward pass, and of a batch one row of the model's width per token and
        block is held.
    effect : bool
        Measure KL(adapter ‖ no adapter) as well: another forward pass of each batch.
    max_memory : int, optional
        Bytes that the sums of all layers may take. Where they take more the layers are measured in
        groups, and the batches are gone through once for each group.
    on_step : callable, optional
        Called with a `ProgressUpdate` after every batch: the examples so far, and those there will be at
        least, over all groups.

    Returns
    -------
    Statistics
        As `read_statistics` reads ``out``. Its ``metadata`` counts "examples" and "answers", which
        one KL divergence is about (examples, or predicted tokens of a language model), and has the
        "effect" among its settings.

    Raises
    ------
    CalibrationError
        If a module is unknown, if there were no batches, if no answer depends on a module, or if
        the sums of a layer alone take more than ``max_memory``.
    CheckpointError
        If ``out`` holds finished statistics, or another run is writing there.
    ShapeError
        If logits or a module's inputs do not fit the examples.

    Notes
    -----
    Costs one forward and one backward pass per batch and group, one forward pass without the
    adapter, and with ``checkpointing`` one more forward pass; O(n²) memory per small layer,
    O(n·rank) per large one. Of a causal model only the positions that count reach the output layer.
    """
    # 1. What is measured, in groups of layers whose sums fit in memory together; what cannot be is
    # refused first.
    out, model, modules = Path(out), base.model, base.modules
    named = modules_by_name(model)
    missing = [name for name in modules if name not in named]
    if missing or not modules:
        some = ", ".join(name for name in named if name)[:200]
        raise CalibrationError(
            f"{', '.join(missing[:5]) or 'no module'}: not in the model, which has {some}, …"
        )
    device, effect = next(model.parameters()).device, effect and hasattr(model, "get_base_model")
    sizes = {name: layer_size(named[name], name) for name in modules}
    groups = in_groups(
        {name: LayerSums.memory(size, max_full, rank) for name, size in sizes.items()}, max_memory
    )
    settings = {
        "modules": list(modules),
        "seed": seed,
        "samples": samples,
        "head": base.head.name,
        "base": base.name,
    }
    settings |= {
        "max_full": max_full,
        "rank": rank,
        "per": "token" if base.head in TOKEN_HEADS else "example",
    }
    settings |= {"adapter_base": base.adapter_base, "adapter": base.adapter_sha256}
    check_unfinished(out)
    rounds: Iterable[Batch] = _used(batches, samples)
    if len(groups) > 1:
        rounds = list(
            rounds
        )  # token numbers, which are small; they are gone through once for each group

    # 2. A pass over the batches for each group. A finished group waits in the journal, under a key
    # with its layers.
    tensors: dict[str, NDArray[Any]] = {}
    about: dict[str, Any] = {}
    whole: Counts | None = None
    with Journal.beside(out) as journal, measuring(model):
        for number, names in enumerate(groups):
            sums = {
                name: LayerSums(sizes[name], max_full=max_full, rank=rank, seed=seed, device=device)
                for name in names
            }
            key = content_key(settings if len(groups) == 1 else settings | {"group": list(names)})

            def seen(
                counts: Counts,
                key: str = key,
                sums: dict[str, LayerSums] = sums,
                number: int = number,
            ) -> None:
                if counts.batches % save_every == 0:
                    save_sums(journal, key, sums, counts)
                if on_step is not None:
                    done = samples * number + counts.examples
                    on_step(ProgressUpdate("calibrating", done, samples * len(groups), "examples"))

            watching = {name: named[name] for name in names}
            with recomputed(model, list(watching.values())) if checkpointing else nullcontext():
                begun = load_sums(journal, key, sums)
                counts, texts = _add_sums(
                    base, watching, sums, rounds, begun, seed, effect and number == 0, seen
                )
            _share_sums(sums)
            if number + 1 < len(groups):
                save_sums(journal, key, sums, counts)
            leading, facts = leading_eigenpairs(sums, counts.answers)
            tensors, about, whole = tensors | leading, about | facts, whole or counts
        # 3. All groups as one. KL(adapter ‖ no adapter) is of the whole model: the first pass has
        # measured it.
        assert whole is not None
        moved = whole.effect / whole.answers if effect else None
        write_statistics(out, settings | {"texts": texts, "effect": moved}, tensors, about, whole)
    return read_statistics(out)


def _add_sums(
    base: Base,
    watching: Mapping[str, nn.Module],
    sums: Mapping[str, LayerSums],
    batches: Iterable[Batch],
    counts: Counts,
    seed: int,
    effect: bool,
    on_batch: Callable[[Counts], None],
) -> tuple[Counts, str]:
    """Add all batches to the sums but those that ``counts`` says they hold: what was seen, and a hash of the texts.

    With ``effect`` KL(adapter ‖ no adapter) is measured as well.
    """
    texts = hashlib.sha256()
    with watched(watching, lambda name, pairs: sums[name].add(pairs)) as record:
        for number, batch in enumerate(batches, start=1):
            texts.update(_content(batch))
            if number <= counts.batches:  # read all the same, since the hash is of all texts
                continue
            # 1. The answers without the adapter, first: what the hooks count of this pass is then
            # forgotten.
            bare = None
            if effect:
                with torch.no_grad(), without_delta(base.model):
                    bare = forward(base, batch)
            record.clear()
            # 2. Those with it: as logits where a watched layer makes them, since gradients must
            # pass through it.
            answers = forward(base, batch, full_logits=output_layer(base) in watching.values())
            # 3. Gradients of answers that seed and batch alone decide, so that a resumed run draws
            #    the same; on their way back every layer adds to its sums.
            generator = torch.Generator().manual_seed((seed << 32) + number)
            gradient, moved = _leaning(base, answers, bare, generator)
            examples = len(answers.counts)
            record.backward(answers.hidden, examples, gradient)
            total = counts.examples + examples, counts.answers + len(answers), counts.effect + moved
            counts = Counts(number, *total)
            del answers, bare, gradient
            on_batch(counts)
    if counts.answers == 0:
        raise CalibrationError(
            "no batches, or no answers in them: there is nothing to calibrate on"
        )
    return counts, texts.hexdigest()


def _share_sums(sums: dict[str, LayerSums]) -> None:
    """An expert that no token was sent to has no gradient: it counts like the least used of its stack."""
    reached = {name: int(each.tokens) for name, each in sums.items() if each.tokens}
    idle = [name for name in sums if name not in reached]
    for name in idle:
        like = least_reached(name, reached)
        if like is None:
            text = "no answer of the model depends on it; leave it out of `modules`"
            raise CalibrationError(f"{', '.join(idle[:5])}: {text}")
        sums[name] = sums[like]


def _leaning(
    base: Base, answers: BatchLogits, bare: BatchLogits | None, generator: torch.Generator
) -> tuple[Tensor, float]:
    """∂ Σ log p(y) / ∂ rows for drawn answers y, (answers, width), and Σ KL(adapter ‖ no adapter)."""
    gradient, moved = torch.empty_like(answers.hidden), 0.0
    with torch.no_grad():
        step = predictions_at_a_time(answers.logits_of(answers.hidden[:1]).shape[-1])
    for start in range(0, len(answers), step):
        # Leaves of a graph of their own, for a few answers at a time; the model's graph is walked
        # once, at the end.
        some = slice(start, start + step)
        rows = answers.hidden[some].detach().requires_grad_()
        logits = answers.logits_of(rows)
        (gradient[some],) = torch.autograd.grad(
            sampled_log_likelihood(logits, base.head, generator), rows
        )
        if bare is not None:
            with torch.no_grad(), without_delta(base.model):
                others = bare.logits_of(bare.hidden[some])
                moved += float(divergences(logits.detach(), others, base.head).sum())
    return gradient, moved


def _used(batches: Iterable[Batch], samples: int) -> Iterator[Batch]:
    """Batches until there are so many examples; the one that reaches the number is used whole."""
    examples = 0
    for batch in batches:
        yield batch
        examples += len(next(iter(batch.values())))
        if examples >= samples:
            return


def _content(batch: Batch) -> bytes:
    """What is read, as bytes, so that statistics can say which texts they are of."""
    return b"".join(
        batch[name].cpu().numpy().tobytes()
        for name in sorted(batch)
        if not batch[name].is_floating_point()
    )
