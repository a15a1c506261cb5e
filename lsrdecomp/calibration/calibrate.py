"""Calibration: the Fisher statistics of a base's Linear layers, measured in one resumable stream.

For a layer y = M x, let x_t be its input at token t and g_t = ∂ log p(ŷ)/∂y_t for a class ŷ drawn
from the model itself. A change D of M changes the distribution p of a prediction, to second order,
by

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lsrdecomp.calibration.accumulators import Counts, LayerSums, group_by_memory, sums_memory
from lsrdecomp.calibration.covariance import CovarianceSettings
from lsrdecomp.calibration.divergence import divergences, without_delta
from lsrdecomp.calibration.errors import CalibrationError
from lsrdecomp.calibration.experts import least_used_expert
from lsrdecomp.calibration.files import (
    check_unfinished,
    leading_eigenpairs,
    load_sums,
    save_sums,
    write_statistics,
)
from lsrdecomp.calibration.forward import (
    BatchLogits,
    forward,
    output_layer,
    predictions_at_a_time,
)
from lsrdecomp.calibration.gradients import sampled_log_likelihood, watched
from lsrdecomp.calibration.heads import TOKEN_HEADS, Batch
from lsrdecomp.calibration.measured_model import (
    layer_size,
    measurement_mode,
    modules_by_name,
    recomputed,
)
from lsrdecomp.checkpoints import Journal, content_key
from lsrdecomp.checkpoints.progress import OnStep, ProgressUpdate
from lsrdecomp.checkpoints.statistics import Statistics, read_statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from lsrdecomp.calibration.base_model import Base
    from lsrdecomp.calibration.gradients import GradientRecorder


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
    """Measure the statistics of a base's layers on batches of inputs, and write them to ``out``.

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
        Seed of the sampled classes and of the random block for large layers.
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
        groups, with one pass over the batches for each group.
    save_every : int
        Batches between two savings of the sums.
    on_step : callable, optional
        Called with a `ProgressUpdate` after every batch: the examples so far, and the fewest that
        there will be, over all groups.

    Returns
    -------
    Statistics
        As `read_statistics` reads ``out``. Its ``metadata`` counts "examples" and "answers", which
        are the predictions that one KL divergence is about (examples, or tokens of a language
        model), and has the "effect" among its settings.

    Raises
    ------
    CalibrationError
        If a module is unknown, if there were no batches, if no prediction depends on a module, or
        if the sums of a layer alone take more than ``max_memory``.
    CheckpointError
        If ``out`` holds finished statistics, or another run is writing there.
    ShapeError
        If logits or a module's inputs do not fit the examples.

    Notes
    -----
    Costs one forward and one backward pass per batch and group, one forward pass without the
    adapter, and with ``checkpointing`` one more forward pass; O(n²) memory per small layer,
    O(n·rank) per large one. Of a causal model only the positions that predict reach the output
    layer.
    """
    # 1. Find the layers, in groups whose sums fit in memory together; refuse what cannot be
    #    measured.
    out = Path(out)
    covariance = CovarianceSettings(max_full, rank, seed=seed)
    layers = _layers_to_measure(base)
    groups = group_by_memory(
        {name: sums_memory(layer_size(layer, name), covariance) for name, layer in layers.items()},
        max_memory,
    )
    check_unfinished(out)
    has_effect = effect and hasattr(base.model, "get_base_model")
    settings = {
        "modules": list(base.modules),
        "seed": seed,
        "samples": samples,
        "head": base.head.name,
        "base": base.name,
        "max_full": max_full,
        "rank": rank,
        "per": "token" if base.head in TOKEN_HEADS else "example",
        "adapter_base": base.adapter_base,
        "adapter": base.adapter_sha256,
    }
    selected: Iterable[Batch] = _first_batches(batches, samples)
    if len(groups) > 1:  # each needs all batches, which are token numbers and small
        selected = list(selected)

    # 2. Make a pass over the batches for each group. A finished group waits in the journal, under a
    #    key with its layers.
    arrays: dict[str, NDArray[Any]] = {}
    metadata: dict[str, Any] = {}
    totals: Counts | None = None
    with Journal.beside(out) as journal, measurement_mode(base.model):
        run = _Run(base, selected, covariance, seed, checkpointing, save_every, journal)
        for number, names in enumerate(groups):
            key = content_key(settings if len(groups) == 1 else settings | {"group": list(names)})
            sums, counts, text_digest = run.measure(
                {name: layers[name] for name in names},
                key,
                # KL(adapter ‖ no adapter) is of the whole model: the first pass measures it.
                effect=has_effect and number == 0,
                report=partial(_report, on_step, number, len(groups), samples),
            )
            if number + 1 < len(groups):
                save_sums(journal, key, sums, counts)
            group_arrays, group_metadata = leading_eigenpairs(sums, counts.answers)
            arrays |= group_arrays
            metadata |= group_metadata
            totals = totals or counts

        # 3. Write all groups as one.
        assert totals is not None
        mean_effect = totals.effect / totals.answers if has_effect else None
        settings |= {"texts": text_digest, "effect": mean_effect}
        write_statistics(out, settings, arrays, metadata, totals)
    return read_statistics(out)


@dataclass(frozen=True, slots=True)
class _Run:
    """What the passes of a calibration share."""

    base: Base
    batches: Iterable[Batch]
    covariance: CovarianceSettings
    seed: int
    checkpointing: bool
    save_every: int
    journal: Journal

    def measure(
        self,
        layers: Mapping[str, nn.Module],
        key: str,
        *,
        effect: bool,
        report: Callable[[int], None],
    ) -> tuple[dict[str, LayerSums], Counts, str]:
        """Make a pass over all batches for a group of layers.

        Parameters
        ----------
        layers : Mapping of name to module
            The layers that are measured.
        key : str
            Under which the journal keeps their sums.
        effect : bool
            Measure KL(adapter ‖ no adapter) as well.
        report : callable
            Called with the number of examples after each batch.

        Returns
        -------
        sums : dict of name to LayerSums
        counts : Counts
            What the sums hold.
        text_digest : str
            SHA-256 of all token numbers.

        Raises
        ------
        CalibrationError
            If there was nothing to predict, or no prediction depends on a layer.
        """
        device = next(self.base.model.parameters()).device
        sums = {
            name: LayerSums(layer_size(layer, name), self.covariance, device)
            for name, layer in layers.items()
        }
        counts = load_sums(self.journal, key, sums)
        digest = hashlib.sha256()
        recompute = recomputed(self.base.model, list(layers.values()))
        with (
            recompute if self.checkpointing else nullcontext(),
            watched(layers, lambda name, layer: sums[name].add(layer)) as recorder,
        ):
            for number, batch in enumerate(self.batches, start=1):
                digest.update(_token_bytes(batch))  # of all texts, those of an earlier run included
                if number <= counts.batches:
                    continue
                counts += self._add_batch(number, batch, recorder, layers, effect=effect)
                if number % self.save_every == 0:
                    save_sums(self.journal, key, sums, counts)
                report(counts.examples)
        if counts.answers == 0:
            raise CalibrationError(
                "no batches, or no predictions in them: there is nothing to calibrate on"
            )
        _fill_unused_experts(sums)
        return sums, counts, digest.hexdigest()

    def _add_batch(
        self,
        number: int,
        batch: Batch,
        recorder: GradientRecorder,
        layers: Mapping[str, nn.Module],
        *,
        effect: bool,
    ) -> Counts:
        """Run the model forward and back on one batch; return what was added to the sums."""
        # 1. Run without the adapter first: the calls that the hooks saw are then forgotten.
        plain = None
        if effect:
            with torch.no_grad(), without_delta(self.base.model):
                plain = forward(self.base, batch)
        recorder.clear()
        # 2. Run with it. Where a watched layer makes the logits they are formed in this pass, since
        #    gradients must pass through it.
        reads_output_layer = output_layer(self.base) in layers.values()
        output = forward(self.base, batch, full_logits=reads_output_layer)
        # 3. Sample classes, decided by seed and batch alone so that a resumed run draws the same,
        #    and go back from them; on the way every layer adds to its sums.
        generator = torch.Generator().manual_seed((self.seed << 32) + number)
        gradient, effect_sum = _sampled_gradient(self.base, output, plain, generator)
        n_examples = len(output.counts)
        recorder.backward(output.hidden, n_examples, gradient)
        return Counts(1, n_examples, len(output), effect_sum)


def _layers_to_measure(base: Base) -> dict[str, nn.Module]:
    """Return the base's ``modules`` by name.

    Raises
    ------
    CalibrationError
        If there are none, or one is not in the model.
    """
    named = modules_by_name(base.model)
    missing = [name for name in base.modules if name not in named]
    if missing or not base.modules:
        known = ", ".join(name for name in named if name)[:200]
        unknown = ", ".join(missing[:5]) or "no module"
        raise CalibrationError(f"{unknown}: not in the model, which has {known}, …")
    return {name: named[name] for name in base.modules}


def _first_batches(batches: Iterable[Batch], samples: int) -> Iterator[Batch]:
    """Yield batches up to and including the one that reaches so many examples."""
    n_examples = 0
    for batch in batches:
        yield batch
        n_examples += len(next(iter(batch.values())))
        if n_examples >= samples:
            return


def _report(on_step: OnStep | None, group: int, n_groups: int, samples: int, done: int) -> None:
    """Tell how many examples of how many are done, over all groups."""
    if on_step is not None:
        n_done = samples * group + done
        on_step(ProgressUpdate("calibrating", n_done, samples * n_groups, "examples"))


def _sampled_gradient(
    base: Base, output: BatchLogits, plain: BatchLogits | None, generator: torch.Generator
) -> tuple[Tensor, float]:
    """Return ∂ Σ log p(y) / ∂ hidden for sampled classes y, and Σ KL(adapter ‖ no adapter).

    The gradient has the shape of ``output.hidden``; the divergence is 0 without ``plain``.
    """
    gradient = torch.empty_like(output.hidden)
    effect_sum = 0.0
    with torch.no_grad():
        n_classes = output.logits_of(output.hidden[:1]).shape[-1]
    size = predictions_at_a_time(n_classes)
    for start in range(0, len(output), size):
        # Leaves of a graph of their own, for a few predictions at a time; the model's graph is
        # walked once, at the end.
        chunk = slice(start, start + size)
        hidden = output.hidden[chunk].detach().requires_grad_()
        logits = output.logits_of(hidden)
        log_likelihood = sampled_log_likelihood(logits, base.head, generator)
        (gradient[chunk],) = torch.autograd.grad(log_likelihood, hidden)
        if plain is not None:
            with torch.no_grad(), without_delta(base.model):
                plain_logits = plain.logits_of(plain.hidden[chunk])
                lost = divergences(logits.detach(), plain_logits, base.head)
                effect_sum += float(lost.sum())
    return gradient, effect_sum


def _fill_unused_experts(sums: dict[str, LayerSums]) -> None:
    """Give an expert without tokens, and so without a gradient, the sums of the least used one."""
    n_tokens = {name: int(layer.tokens) for name, layer in sums.items() if layer.tokens}
    unused = [name for name in sums if name not in n_tokens]
    for name in unused:
        substitute = least_used_expert(name, n_tokens)
        if substitute is None:
            raise CalibrationError(
                f"{', '.join(unused[:5])}: no prediction of the model depends on it; "
                "leave it out of `modules`"
            )
        sums[name] = sums[substitute]


def _token_bytes(batch: Batch) -> bytes:
    """Return what is read as bytes, so that statistics can say which texts they are of."""
    integers = [name for name in sorted(batch) if not batch[name].is_floating_point()]
    return b"".join(batch[name].cpu().numpy().tobytes() for name in integers)
