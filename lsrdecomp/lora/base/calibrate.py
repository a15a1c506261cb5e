"""Calibration: the Fisher statistics of a base's Linear layers, measured in one resumable stream.

The statistics of a layer are two matrices, G and C, such that ½ ‖G^½ D C^½‖_F² estimates how much
the model's predictions change when the layer's matrix changes by D.

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
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lsrdecomp.errors import CalibrationError
from lsrdecomp.lora.base.accumulators import Counts, LayerSums, group_by_memory, sums_memory
from lsrdecomp.lora.base.batch_rows import examples_in, tensors_in
from lsrdecomp.lora.base.covariance import CovarianceSettings
from lsrdecomp.lora.base.divergence import divergences, without_delta
from lsrdecomp.lora.base.expert_layers import least_used_expert
from lsrdecomp.lora.base.forward import BatchLogits, forward, output_layer, predictions_at_a_time
from lsrdecomp.lora.base.heads import TOKEN_HEADS, Batch
from lsrdecomp.lora.base.measured_model import (
    layer_size,
    measurement_mode,
    modules_by_name,
    recompute_activations,
)
from lsrdecomp.lora.base.sampled_gradients import sampled_log_likelihood, watched
from lsrdecomp.lora.base.statistics_files import (
    check_output,
    finished_layers,
    load_sums,
    save_sums,
    write_statistics,
)
from lsrdecomp.lora.files import Journal, content_key
from lsrdecomp.lora.files.progress import OnStep, ProgressUpdate
from lsrdecomp.lora.files.statistics import Statistics, read_statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from lsrdecomp.lora.base.base_model import Base
    from lsrdecomp.lora.base.sampled_gradients import GradientRecorder, LayerGradients
    from lsrdecomp.lora.base.text_profile import TextProfile


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
    text_profile: TextProfile | None = None,
    on_step: OnStep | None = None,
) -> Statistics:
    """Measure the statistics of a base's layers on batches of inputs, and write them to ``out``.

    The model is put into evaluation mode for the time of the call; no parameter of it changes.
    Every ``save_every`` batches the running sums are saved in the journal beside ``out``. The same
    call with the same batches resumes from there, with the same result as an uninterrupted one.

    Parameters
    ----------
    base : Base
        As `load_base` opens it, with the adapter active that is to be compressed; or any model with
        the names of Linear layers in it and the `Head` that says what its logits mean. Called as
        ``base.model(**model_inputs(batch)).logits``. The metadata records the names and the digest
        of base and adapter: `compress` refuses adapters of another base, and knows whether
        ``effect`` is that of the adapter it compresses.
    batches : iterable of mappings
        Arguments of the model. ``attention_mask`` (``decoder_attention_mask`` or ``labels`` for
        seq2seq), where given, marks the tokens that are no padding.
    out : path
        Directory to write `statistics.json` and `statistics.safetensors` to; created if it does not
        exist.
    seed : int
        Seed of the sampled classes, and of the random columns for large layers.
    samples : int
        Examples to use. The batch that reaches the number is used whole.
    max_full : int
        Largest side of a matrix that is added up in full. Of a larger one the product with
        2·``rank`` random columns is added up.
    rank : int
        Leading eigenpairs of each matrix that are written, in half precision. The other eigenvalues
        are replaced by their mean.
    checkpointing : bool
        Recompute activations in the backward pass: the blocks of a transformers model keep only
        their inputs, one row of the model's width per token. Costs another forward pass.
    effect : bool
        Measure KL(adapter ‖ no adapter) as well: another forward pass of each batch.
    max_memory : int, optional
        Maximum bytes of the running sums. If those of all layers take more, layers are measured in
        groups, with one pass over the batches for each group.
    save_every : int
        Batches after which the sums are saved again.
    text_profile : TextProfile, optional
        What the texts are like, for the metadata: `compress` then warns of texts that are unlike.
    on_step : callable, optional
        Called with a `ProgressUpdate` after every batch: the examples so far, and the least number
        that there will be, over all groups.

    Returns
    -------
    Statistics
        As `read_statistics` reads ``out``. Its ``metadata`` has the numbers of "examples" and of
        "answers", which are predictions (one per example, or one per token for language models),
        and the "effect" per prediction among its settings.

    Raises
    ------
    CalibrationError
        If a module is unknown, if there were no batches, if no prediction depends on a module, or
        if the sums of one layer take more than ``max_memory``.
    CheckpointError
        If ``out`` holds finished statistics, or another run is writing there.
    ShapeError
        If logits or a module's inputs do not fit the examples.

    Notes
    -----
    Costs one forward and one backward pass per batch and group, one forward pass without the
    adapter, and with ``checkpointing`` one more forward pass. The sums of a layer take O(n²) memory
    if it is small, O(n·rank) if it is large. Of a causal model only the positions that predict
    reach the output layer.
    """
    # 1. Find the layers, in groups whose sums fit in memory together.
    out = Path(out)
    covariance = CovarianceSettings(max_full, rank, seed=seed)
    layers = _layers_to_measure(base)
    memory = {
        name: sums_memory(layer_size(layer, name), covariance) for name, layer in layers.items()
    }
    groups = group_by_memory(memory, max_memory)
    check_output(out)
    has_effect = effect and hasattr(base.model, "get_base_model")
    selected: Iterable[Batch] = _first_batches(batches, samples)
    if len(groups) > 1:  # each group reads all batches, which are token numbers and small
        selected = list(selected)
    # 2. Make a pass over the batches for each group. The sums of a group wait in the journal until
    #    all groups are finished, under a key that a run with other settings does not have.
    settings = _settings_record(base, covariance, samples)
    with Journal.beside(out) as journal, measurement_mode(base.model):
        passes = _GroupPass(base, selected, covariance, checkpointing, save_every, journal)
        grouped_layers = [{name: layers[name] for name in names} for names in groups]
        report = partial(_report_progress, on_step, len(groups), samples)
        measured = passes.measure_groups(grouped_layers, settings, effect=has_effect, report=report)
        # 3. Write all groups as one.
        counts = measured.counts
        about: dict[str, Any] = {
            "texts": measured.text_digest,
            "effect": counts.effect / counts.answers if has_effect else None,
        }
        if text_profile is not None:
            about["text_profile"] = text_profile.to_json()
        write_statistics(out, settings | about, measured.arrays, measured.metadata, counts)
    return read_statistics(out)


def _settings_record(base: Base, covariance: CovarianceSettings, samples: int) -> dict[str, Any]:
    """Return the settings that the metadata records, on which all sums depend."""
    return {
        "modules": list(base.modules),
        "seed": covariance.seed,
        "samples": samples,
        "head": base.head.name,
        "base": base.name,
        "max_full": covariance.max_full,
        "rank": covariance.rank,
        "per": "token" if base.head in TOKEN_HEADS else "example",
        "adapter_base": base.adapter_base,
        "adapter": base.adapter_sha256,
    }


@dataclass(frozen=True, slots=True)
class _Measured:
    """What the passes over all batches gave."""

    arrays: dict[str, NDArray[Any]]
    metadata: dict[str, Any]
    counts: Counts  # of the first pass, which measures the adapter's effect too
    text_digest: str


@dataclass(frozen=True, slots=True)
class _GroupPass:
    """A pass over all batches that measures a group of layers; all groups share its fields."""

    base: Base
    batches: Iterable[Batch]
    covariance: CovarianceSettings
    checkpointing: bool
    save_every: int
    journal: Journal

    def measure_groups(
        self,
        groups: Sequence[Mapping[str, nn.Module]],
        settings: dict[str, Any],
        *,
        effect: bool,
        report: Callable[[int, int], None],
    ) -> _Measured:
        """Make a pass over all batches for each group of layers.

        Parameters
        ----------
        groups : sequence of Mapping of name to module
        settings : dict
            What the sums depend on, beside their group.
        effect : bool
            Measure KL(adapter ‖ no adapter) as well.
        report : callable
            Called with the group and the number of examples after each batch.
        """
        arrays: dict[str, NDArray[Any]] = {}
        metadata: dict[str, Any] = {}
        all_counts: list[Counts] = []
        for index, layers in enumerate(groups):
            group_settings = settings if len(groups) == 1 else settings | {"group": list(layers)}
            key = content_key(group_settings)
            # The effect is that of the whole model: the first pass measures it for all layers.
            sums, counts, text_digest = self.measure(
                layers, key, effect=effect and index == 0, report=partial(report, index)
            )
            if index < len(groups) - 1:
                save_sums(self.journal, key, sums, counts)
            group_arrays, group_metadata = finished_layers(sums, counts.answers)
            arrays |= group_arrays
            metadata |= group_metadata
            all_counts.append(counts)
        return _Measured(arrays, metadata, all_counts[0], text_digest)

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
        key : str
            Key of their sums in the journal.
        effect : bool
            Measure KL(adapter ‖ no adapter) as well.
        report : callable
            Called with the number of examples after each batch.

        Returns
        -------
        sums : dict of name to LayerSums
        counts : Counts
            Numbers of what the sums are over.
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

        def add_to_sums(name: str, gradients: LayerGradients) -> None:
            sums[name].add(gradients)

        memory_saver: AbstractContextManager[Any] = nullcontext()
        if self.checkpointing:
            memory_saver = recompute_activations(self.base.model, list(layers.values()))
        with memory_saver, watched(layers, add_to_sums) as recorder:
            for number, batch in enumerate(self.batches, start=1):
                digest.update(_token_bytes(batch))
                if number <= counts.batches:  # an earlier run has added it
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
        """Run the model forward and backward on one batch; return what was added to the sums."""
        # 1. Run without the adapter, for its effect; forget the calls that hooks recorded.
        plain = None
        if effect:
            with torch.no_grad(), without_delta(self.base.model):
                plain = forward(self.base, batch)
        recorder.clear()
        # 2. Run with the adapter. If the output layer is measured itself, gradients must pass
        #    through it: then its logits are formed in this pass.
        measures_output_layer = output_layer(self.base) in layers.values()
        output = forward(self.base, batch, full_logits=measures_output_layer)
        # 3. Sample classes. The draws depend on seed and batch alone, so that a resumed run repeats
        #    them.
        generator = torch.Generator().manual_seed((self.covariance.seed << 32) + number)
        gradient, effect_sum = _sampled_gradient(self.base, output, plain, generator)
        # 4. Run backward from them; meanwhile every layer adds to its sums.
        n_examples = len(output.counts)
        # Where an example has several rows, each of them passes through the layers by itself.
        n_rows = n_examples if self.base.head in TOKEN_HEADS else len(output)
        recorder.backward(output.hidden, n_rows, gradient)
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
    """Yield batches until they have ``samples`` examples together."""
    n_examples = 0
    for batch in batches:
        yield batch
        n_examples += examples_in(batch)
        if n_examples >= samples:
            return


def _report_progress(
    on_step: OnStep | None, n_groups: int, samples: int, group: int, n_examples: int
) -> None:
    """Report the examples done over all groups, after ``n_examples`` of the current one."""
    if on_step is not None:
        n_done = samples * group + n_examples
        on_step(ProgressUpdate("calibrating", n_done, samples * n_groups, "examples"))


def _sampled_gradient(
    base: Base, output: BatchLogits, plain: BatchLogits | None, generator: torch.Generator
) -> tuple[Tensor, float]:
    """Return the gradient of a sampled log-likelihood, and the adapter's effect.

    Parameters
    ----------
    base : Base
    output, plain : BatchLogits
        The model's outputs with and without its adapter.
    generator : torch.Generator
        Draws a class y for each prediction from the model's own distribution.

    Returns
    -------
    gradient : Tensor, shape of ``output.hidden``
        ∂ Σ log p(y) / ∂ hidden.
    effect_sum : float
        Σ KL(adapter ‖ no adapter) over predictions; 0 without ``plain``.

    Raises
    ------
    CalibrationError
        If the model's outputs are not finite.
    """
    gradient = torch.empty_like(output.hidden)
    sums: list[Tensor] = []  # of the likelihood and of the effect, chunk by chunk
    with torch.no_grad():
        n_classes = output.form_logits(output.hidden[:1]).shape[-1]
    size = predictions_at_a_time(n_classes)
    for start in range(0, len(output), size):
        chunk = slice(start, start + size)
        # The hidden states are cut off from the model's graph: each chunk has a small graph of its
        # own, from hidden states to logits. The caller walks the model's graph once for all chunks.
        hidden = output.hidden[chunk].detach().requires_grad_()
        logits = output.form_logits(hidden)
        log_likelihood = sampled_log_likelihood(logits, base.head, generator)
        (gradient[chunk],) = torch.autograd.grad(log_likelihood, hidden)
        effect = torch.zeros((), dtype=torch.float64, device=logits.device)
        if plain is not None:
            # The output layer may be adapted too.
            with torch.no_grad(), without_delta(base.model):
                plain_logits = plain.form_logits(plain.hidden[chunk])
            effect = divergences(logits.detach(), plain_logits, base.head).sum()
        sums.append(torch.stack((log_likelihood.detach().double(), effect)))
    # A GPU is waited for here, once for all chunks.
    likelihood, effect_sum = torch.stack(sums).sum(0).tolist() if sums else (0.0, 0.0)
    if not math.isfinite(likelihood):
        raise CalibrationError(
            f"{base.name}: the model's outputs on these data are not finite; float16 overflows "
            "where bfloat16 and float32 do not"
        )
    return gradient, effect_sum


def _fill_unused_experts(sums: dict[str, LayerSums]) -> None:
    """Give experts that no token was sent to the sums of the least used expert of their stack.

    Raises
    ------
    CalibrationError
        If a layer that is no such expert had no tokens.
    """
    n_tokens = {name: int(layer.tokens) for name, layer in sums.items()}
    used = {name: count for name, count in n_tokens.items() if count}
    unused = [name for name in sums if name not in used]
    for name in unused:
        substitute = least_used_expert(name, used)
        if substitute is None:
            raise CalibrationError(
                f"{', '.join(unused[:5])}: no prediction of the model depends on it; "
                "leave it out of `modules`"
            )
        sums[name] = sums[substitute]


def _token_bytes(batch: Batch) -> bytes:
    """Return the token numbers and masks of a batch as bytes, for the digest of all texts.

    Where there are none, as in images, it is the numbers that the model reads.
    """
    tensors = tensors_in([batch[name] for name in sorted(batch)])
    integers = [tensor for tensor in tensors if not tensor.is_floating_point()]
    if not integers:
        integers = [tensor.float() for tensor in tensors]
    return b"".join(tensor.cpu().numpy().tobytes() for tensor in integers)
