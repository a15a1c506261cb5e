"""Calibration: second moments whose norm predicts a KL divergence; a run can be interrupted."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from oracles import matrix_of  # noqa: E402

from lsrdecomp.errors import (  # noqa: E402
    CalibrationError,
    CheckpointError,
    ShapeError,
)
from lsrdecomp.lora.base.accumulators import LayerSums  # noqa: E402
from lsrdecomp.lora.base.base_model import Base  # noqa: E402
from lsrdecomp.lora.base.calibrate import calibrate  # noqa: E402
from lsrdecomp.lora.base.covariance import Covariance, CovarianceSettings  # noqa: E402
from lsrdecomp.lora.base.heads import Head  # noqa: E402
from lsrdecomp.lora.base.sampled_gradients import sampled_log_likelihood, watched  # noqa: E402
from lsrdecomp.lora.files.statistics import read_statistics  # noqa: E402

SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 50,
}
QUERY, VALUE = (f"bert.encoder.layer.0.attention.self.{name}" for name in ("query", "value"))
DENSE = "bert.encoder.layer.1.output.dense"


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL, num_labels=3, initializer_range=0.3)
    return transformers.BertForSequenceClassification(config).eval()


def texts(count, *, size=8, shortest=5, longest=12, seed=0):
    """Random token batches with padding on the right."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        lengths = torch.randint(shortest, longest + 1, (size, 1), generator=generator)
        mask = (torch.arange(longest) < lengths).long()
        yield {
            "input_ids": torch.randint(1, 50, (size, longest), generator=generator) * mask,
            "attention_mask": mask,
        }


def plain(model, modules, head=Head.classification):
    return Base("", model, None, head, tuple(modules))


def measured_kl(model, name, difference, batches):
    """Return the mean KL divergence of the model's answers once ``difference`` is added."""
    weight = dict(model.named_parameters())[f"{name}.weight"]
    total, examples = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            before = model(**batch).logits.double().log_softmax(-1)
            weight += difference
            after = model(**batch).logits.double().log_softmax(-1)
            weight -= difference
            total += float((before.exp() * (before - after)).sum())
            examples += len(before)
    return total / examples


def predicted_kl(statistics, difference):
    """½ ‖G^½ D C^½‖_F², from formed matrices."""
    C, G = matrix_of(statistics.input), matrix_of(statistics.output)
    return 0.5 * float(np.trace(G @ difference @ C @ difference.T))


@pytest.mark.parametrize("name", [QUERY, DENSE])
def test_half_the_squared_norm_predicts_the_kl_of_a_small_change(classifier, tmp_path, name):
    calibrate(plain(classifier, [name]), texts(64), out=tmp_path, seed=0, samples=512)
    statistics = read_statistics(tmp_path).measured(name)
    shape, ratios = (statistics.output.size, statistics.input.size), []
    for seed in range(4):
        difference = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 3e-3
        measured = measured_kl(classifier, name, torch.from_numpy(difference), texts(16, seed=1))
        ratios.append(predicted_kl(statistics, difference.astype(float)) / measured)
    # The trace is matched, so the mean over random changes is right up to sampling; a single one is
    # near.
    assert 0.7 < np.mean(ratios) < 1.4
    assert 0.5 < min(ratios) <= max(ratios) < 2


def test_language_models_count_per_predicted_token(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=24, n_layer=2, n_head=2, vocab_size=50, n_positions=16, initializer_range=0.3
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    name = "transformer.h.0.attn.c_attn"  # a Conv1D: its weight is stored transposed
    done = calibrate(
        plain(model, [name], Head.causal_lm), texts(24), out=tmp_path, seed=0, samples=192
    )
    assert done.metadata["answers"] == sum(
        int(batch["attention_mask"].sum()) - 8 for batch in texts(24)
    )
    statistics = read_statistics(tmp_path).measured(name)
    shape = (72, 24)
    statistics.check(shape)
    weight, ratios = model.get_submodule(name).weight, []
    for seed in range(3):
        difference = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 3e-3
        total, tokens = 0.0, 0
        with torch.no_grad():
            for batch in texts(8, seed=1):
                before = model(**batch).logits.double().log_softmax(-1)
                weight += torch.from_numpy(difference.T)
                after = model(**batch).logits.double().log_softmax(-1)
                weight -= torch.from_numpy(difference.T)
                real = batch["attention_mask"][:, 1:].bool()
                total += float((before.exp() * (before - after)).sum(-1)[:, :-1][real].sum())
                tokens += int(real.sum())
        ratios.append(predicted_kl(statistics, difference.astype(float)) / (total / tokens))
    assert 0.7 < np.mean(ratios) < 1.4


def test_a_sequence_to_sequence_model_is_calibrated_on_both_sides(tmp_path):
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        vocab_size=50,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    names = ["encoder.block.0.layer.0.SelfAttention.q", "decoder.block.0.layer.1.EncDecAttention.k"]
    labels = torch.tensor([[5, 6, 7, 1], [8, 1, -100, -100]])
    batches = [batch | {"labels": labels} for batch in texts(3, size=2)]
    done = calibrate(plain(model, names, Head.seq2seq), batches, out=tmp_path, seed=0, samples=6)
    assert done.metadata["answers"] == 3 * 6
    layers = json.loads((tmp_path / "statistics.json").read_text())["layers"]
    real = sum(int(batch["attention_mask"].sum()) for batch in batches)
    assert [layers[name]["tokens"] for name in names] == [real, real]


def test_what_lies_in_padding_does_not_count(classifier, tmp_path):
    clean = list(texts(3))
    noisy = [
        batch | {"input_ids": batch["input_ids"] + 7 * (1 - batch["attention_mask"])}
        for batch in clean
    ]
    for name, batches in (("clean", clean), ("noisy", noisy)):
        calibrate(
            plain(classifier, [QUERY, DENSE]), batches, out=tmp_path / name, seed=0, samples=24
        )
    layers = json.loads((tmp_path / "noisy" / "statistics.json").read_text())["layers"]
    assert layers[QUERY]["tokens"] == sum(int(batch["attention_mask"].sum()) for batch in clean)
    # After the last layer only the first token feeds the answer.
    assert layers[DENSE]["tokens"] == 24
    first, second = (
        read_statistics(tmp_path / name).measured(QUERY) for name in ("clean", "noisy")
    )
    np.testing.assert_allclose(
        matrix_of(first.input), matrix_of(second.input), atol=1e-5 * first.input.trace
    )


@pytest.mark.parametrize("tokens", [3, 40])
def test_the_sums_are_products_of_weight_gradients(tokens):
    generator = torch.Generator().manual_seed(1)
    layer = torch.nn.Linear(6, 5)
    inputs = torch.randn(4, tokens, 6, generator=generator)
    weights = torch.randn(4, tokens, 5, generator=generator)
    found = {}
    with watched({"layer": layer}, found.__setitem__) as record:
        record.backward((layer(inputs) * weights).sum(), 4)
        assert record.calls == {"layer": []}
        score = (layer(inputs) * weights).sum()
        with pytest.raises(ShapeError, match=f"{4 * tokens} input rows .* for 7 examples"):
            record.backward(score, 7)
    gradients = []
    for i in range(4):
        layer.weight.grad = None
        (layer(inputs[i]) * weights[i]).sum().backward()
        gradients.append(layer.weight.grad.double().numpy())
    sums = LayerSums((5, 6), CovarianceSettings(max_full=8, rank=6, seed=0), torch.device("cpu"))
    sums.add(found["layer"])
    spectra = sums.spectra(predictions=4)
    into, out, fisher = spectra.input, spectra.output, spectra.fisher_trace
    np.testing.assert_allclose(fisher, sum((w**2).sum() for w in gradients) / 4, rtol=1e-5)
    np.testing.assert_allclose(into.trace, inputs.square().sum() / (4 * tokens), rtol=1e-5)
    np.testing.assert_allclose(out.trace * into.trace, fisher, rtol=1e-5)
    for spectrum, product in (
        (into, sum(w.T @ w for w in gradients)),
        (out, sum(w @ w.T for w in gradients)),
    ):
        expected = product * spectrum.trace / np.trace(product)
        measured = spectrum.basis * spectrum.values @ spectrum.basis.T
        np.testing.assert_allclose(measured, expected, atol=1e-5 * spectrum.trace)


class Twice(torch.nn.Module):
    """One layer used twice, under two names."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.second = self.first
        self.head = torch.nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x).tanh_()  # in place: what the hooks hold must not be written over
        return SimpleNamespace(logits=self.head(self.second(x)))


def test_a_shared_module_counts_each_use_and_bears_each_name(tmp_path):
    torch.manual_seed(0)
    model = Twice()
    batches = [{"x": torch.randn(64, 6)} for _ in range(40)]
    calibrate(plain(model, ["first", "second"]), batches, out=tmp_path, seed=0, samples=2560)
    statistics = read_statistics(tmp_path)
    assert statistics.metadata["layers"]["first"]["tokens"] == 2 * 2560
    first, second = statistics.measured("first"), statistics.measured("second")
    np.testing.assert_array_equal(first.input.values, second.input.values)
    ratios = []
    for seed in range(4):
        difference = np.random.default_rng(seed).standard_normal((6, 6)).astype(np.float32) * 1e-2
        measured = measured_kl(model, "first", torch.from_numpy(difference), batches)
        ratios.append(predicted_kl(first, difference.astype(float)) / measured)
    assert 0.6 < np.mean(ratios) < 1.6


class StopHereError(Exception):
    pass


def test_an_interrupted_run_goes_on_to_the_same_bits(classifier, tmp_path):
    base = plain(classifier, [QUERY, DENSE])
    settings = {"seed": 3, "samples": 40, "save_every": 2, "max_full": 30, "rank": 5}

    def stop(step):
        if step.done == 24:  # in three batches
            raise StopHereError

    with pytest.raises(StopHereError):
        calibrate(base, texts(5), out=tmp_path / "a", on_step=stop, **settings)
    assert [path.name for path in tmp_path.iterdir()] == [".a.journal"]
    others = []

    def stop_others(step):
        others.append(step.done)
        stop(step)

    # With another seed: it goes on from nothing, and takes nothing away.
    with pytest.raises(StopHereError):
        calibrate(
            base, texts(5), out=tmp_path / "a", on_step=stop_others, **{**settings, "seed": 4}
        )
    assert others == [8, 16, 24]
    seen = []
    calibrate(
        base,
        texts(5),
        out=tmp_path / "a",
        on_step=lambda step: seen.append((step.done, step.total)),
        **settings,
    )
    assert seen == [(24, 40), (32, 40), (40, 40)]
    calibrate(base, texts(5), out=tmp_path / "b", **settings)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {"statistics.json", "statistics.safetensors"}
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    with pytest.raises(CheckpointError, match="finished statistics"):
        calibrate(base, texts(5), out=tmp_path / "b", **settings)


def test_the_model_is_left_as_it_was(tmp_path):
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(**SMALL, num_labels=3)
    ).train()
    model.gradient_checkpointing_enable()
    model.bert.embeddings.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    hooks = [len(module._forward_hooks) for module in model.modules()]
    calibrate(plain(model, [QUERY]), texts(1), out=tmp_path, seed=0, samples=8)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    assert model.is_gradient_checkpointing
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


def test_errors_name_what_is_missing(classifier, tmp_path):
    with pytest.raises(CalibrationError, match="no.such.layer: not in the model"):
        calibrate(plain(classifier, ["no.such.layer"]), texts(1), out=tmp_path, seed=0, samples=8)
    name = "bert.encoder.layer.0.output.LayerNorm"
    with pytest.raises(CalibrationError, match="is a LayerNorm"):
        calibrate(plain(classifier, [name]), texts(1), out=tmp_path, seed=0, samples=8)
    with pytest.raises(CalibrationError, match="nothing to calibrate on"):
        calibrate(plain(classifier, [QUERY]), [], out=tmp_path, seed=0, samples=8)
    with pytest.raises(ShapeError, match=r"logits of shape \(8, 3\) for causal_lm"):
        calibrate(
            plain(classifier, [QUERY], Head.causal_lm), texts(1), out=tmp_path, seed=0, samples=8
        )
    assert list(tmp_path.iterdir()) == []


def test_a_class_without_probability_is_never_drawn():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]]).repeat(10_000, 1)
    logits.requires_grad_()
    score = sampled_log_likelihood(logits, Head.classification, torch.Generator().manual_seed(3))
    assert torch.isfinite(score)
    again = sampled_log_likelihood(logits, Head.classification, torch.Generator().manual_seed(3))
    assert score == again


def test_outputs_that_are_not_finite_are_told(classifier, tmp_path):
    base = plain(copy.deepcopy(classifier), [QUERY])
    with torch.no_grad():
        next(base.model.parameters()).fill_(torch.nan)
    with pytest.raises(CalibrationError, match="the model's outputs on these data are not finite"):
        calibrate(base, texts(1), out=tmp_path / "statistics", seed=0, samples=8)


def test_drawn_answers_have_the_fisher_matrix_of_the_model():
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([1.0, 0.0, -1.0]).repeat(40_000, 1).requires_grad_()
    score, answers = sampled_log_likelihood(logits, Head.classification, generator), len(logits)
    (gradient,) = torch.autograd.grad(score, logits)
    p = logits[0].detach().softmax(0)
    fisher = torch.diag(p) - torch.outer(p, p)
    assert answers == 40_000
    torch.testing.assert_close(gradient.T @ gradient / answers, fisher, rtol=0, atol=0.01)
    value = torch.zeros(40_000, 1, requires_grad=True)
    (gradient,) = torch.autograd.grad(sampled_log_likelihood(value, Head.numbers, generator), value)
    assert abs(float(gradient.square().mean()) - 1) < 0.05


def test_a_wide_covariance_keeps_its_leading_eigenpairs_and_its_trace():
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((300, 300)))[0]
    scales = np.concatenate((100 * 0.7 ** np.arange(20), np.full(280, 0.1)))
    rows = rng.standard_normal((4000, 300)) * scales @ basis.T
    sizes = ((299, 16), (300, 300))
    wide, whole = (
        Covariance(300, CovarianceSettings(max_full=n, rank=k, seed=0), torch.device("cpu"))
        for n, k in sizes
    )
    for part in np.split(rows, 8):
        for covariance in (wide, whole):
            covariance.add(torch.from_numpy(part), torch.from_numpy(part))
    kept, exact = wide.spectrum(1.0), whole.spectrum(1.0)
    assert kept.basis.shape == (300, 16)
    np.testing.assert_allclose(kept.basis.T @ kept.basis, np.eye(16), atol=1e-5)
    # One pass loses at most about the energy beyond the block's 32 columns; it goes to the rest.
    # Sums are in single precision, so every eigenvalue is known to a part of the largest one, which
    # is a million times the smallest.
    tail, noise = exact.values[32:].sum(), 1e-4 * exact.values[0]
    assert np.all(kept.values <= exact.values[:16] + noise)
    assert np.all(kept.values >= exact.values[:16] - tail - noise)
    assert tail < exact.values[11]
    np.testing.assert_allclose(
        exact.values, np.linalg.eigvalsh(rows.T @ rows)[::-1], rtol=1e-3, atol=noise
    )
    np.testing.assert_allclose(
        exact.values[:8], np.linalg.eigvalsh(rows.T @ rows)[::-1][:8], rtol=1e-3
    )
    assert exact.rest == 0.0
    np.testing.assert_allclose(kept.values.sum() + 284 * kept.rest, (rows**2).sum(), rtol=1e-5)
