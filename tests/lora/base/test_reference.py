"""Logits kept for comparison: the same numbers as anew, few of them, an honest standard error."""

from __future__ import annotations

import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from peft import LoraConfig, get_peft_model  # noqa: E402
from tiny_bases import TEXTS, make_model, open_pair, write_directories  # noqa: E402

from lsrdecomp.lora.base.batches import text_batches  # noqa: E402
from lsrdecomp.lora.base.divergence import (  # noqa: E402
    Reference,
    divergences,
    ratio_standard_error,
    sum_by_example,
)
from lsrdecomp.lora.base.forward import forward, forward_repeatable, output_layer  # noqa: E402
from lsrdecomp.lora.base.heads import Head  # noqa: E402
from lsrdecomp.lora.base.open_bases import load_base  # noqa: E402


@pytest.fixture(scope="module", params=["SEQ_CLS", "CAUSAL_LM"])
def pair(request, tmp_path_factory):
    folder = write_directories(tmp_path_factory.mktemp(request.param.lower()), request.param)
    return open_pair(folder / "base", folder / "lora", folder / "lsr")


def all_batches(base, size=6):
    return list(text_batches(base, TEXTS, size=size, max_length=16, seed=0))


def test_many_forms_are_compared_with_one_set_of_answers(pair):
    source, written = pair
    kept = Reference(source, all_batches(source))
    assert kept.compare(source).kl == pytest.approx(0.0, abs=1e-12)
    # Comparisons before this one change nothing.
    assert kept.compare(written) == Reference(source, all_batches(source)).compare(written)
    assert kept.compare(written).effect == kept.effect


def test_share_and_error_do_not_depend_on_the_size_of_batches(pair):
    source, written = pair
    one, other = (Reference(source, all_batches(source, size)).compare(written) for size in (20, 3))
    assert one.kept == pytest.approx(other.kept, abs=1e-4)
    assert one.standard_error == pytest.approx(other.standard_error, rel=1e-2)


def test_right_answers_are_those_that_the_data_have_token_by_token(tmp_path):
    folder = write_directories(tmp_path, "CAUSAL_LM")
    source, written = open_pair(folder / "base", folder / "lora", folder / "lsr")
    prompts = torch.tensor([[3, 4 + i, 5 + 2 * i] for i in range(12)])

    def likeliest(model):
        with torch.no_grad():
            return model(input_ids=prompts).logits[:, -1].argmax(-1)

    answers = likeliest(source.model)
    with source.model.disable_adapter():
        by_base = likeliest(source.model)
    batch = {
        "input_ids": torch.cat([prompts, answers[:, None]], 1),
        "attention_mask": torch.ones(12, 4, dtype=torch.long),
    }
    assert Reference(source, [batch]).compare(written).right is None  # nothing is a completion
    batch["loss_mask"] = torch.tensor([[0, 0, 0, 1]] * 12)
    expected = [int((each == answers).sum()) for each in (by_base, answers)]
    by_written = int((likeliest(written.model) == answers).sum())
    found = Reference(source, [batch]).compare(written)
    assert found.right == (*expected, by_written)
    assert expected[1] == 12 > by_written


def test_completions_of_one_prompt_are_one_to_the_standard_error(tmp_path):
    folder = write_directories(tmp_path, "CAUSAL_LM")
    source, written = open_pair(folder / "base", folder / "lora", folder / "lsr")
    ids = torch.tensor([[3, 4 + i, 5 + 2 * i, 6 + i] for i in range(12)])
    mask = torch.tensor([[0, 0, 0, 1]] * 12)
    once = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": mask}

    def compared(batch):
        return Reference(source, [batch, batch]).compare(written)

    # Each prompt has its completion twice, which says no more than once
    once_alone = Reference(source, [once]).compare(written)
    assert compared(once).kept == pytest.approx(once_alone.kept, abs=1e-6)
    assert compared(once).standard_error == pytest.approx(once_alone.standard_error, rel=1e-4)
    # Texts without a prompt are alone, also where a token begins each
    for start in (0, 1):
        alone = {**once, "loss_mask": torch.tensor([[0] * start + [1] * (4 - start)] * 12)}
        single = Reference(source, [alone]).compare(written).standard_error
        assert compared(alone).standard_error == pytest.approx(single / 2**0.5, rel=0.05)


def test_rows_of_trained_tokens_are_no_part_of_delta(tmp_path):
    write_directories(tmp_path, "CAUSAL_LM")
    config = LoraConfig(
        target_modules=["c_attn"], task_type="CAUSAL_LM", trainable_token_indices=[3, 7]
    )
    # An adapter whose ΔW is 0 at its start.
    get_peft_model(make_model("CAUSAL_LM")[0], config).save_pretrained(tmp_path / "tokens")
    source = load_base(tmp_path / "base", tmp_path / "tokens")
    for name, parameter in source.model.named_parameters():
        if "trainable_tokens_delta" in name:
            parameter.data.add_(1.0)
    assert Reference(source, all_batches(source)).effect == 0.0
    assert source.modules == ("transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_attn")


def test_the_standard_error_is_the_jackknife_over_examples():
    draws = np.random.default_rng(0)
    lost, effects = draws.exponential(size=9), draws.exponential(size=9) + 0.5
    shares = [1 - np.delete(lost, i).sum() / np.delete(effects, i).sum() for i in range(9)]
    expected = np.sqrt(8 * np.var(shares))
    assert ratio_standard_error(torch.tensor(lost), torch.tensor(effects)) == pytest.approx(
        expected, rel=1e-12
    )
    assert ratio_standard_error(torch.tensor(lost[:1]), torch.tensor(effects[:1])) is None


def test_the_standard_error_is_how_far_the_share_scatters():
    generator = torch.Generator().manual_seed(0)
    effects = torch.rand(400, 50, generator=generator, dtype=torch.float64) + 0.2
    lost = effects * torch.rand(400, 50, generator=generator, dtype=torch.float64) * 0.2
    shares = 1 - lost.sum(1) / effects.sum(1)
    errors = [ratio_standard_error(*row) for row in zip(lost, effects, strict=True)]
    assert float(shares.std()) == pytest.approx(np.mean(errors), rel=0.12)


def test_margins_are_of_the_two_first_classes_by_example(pair):
    source, _ = pair
    reference = Reference(source, all_batches(source))
    margins, uncertainties = reference.margins()
    assert [len(each) for each in margins] == reference.counts.tolist()
    with torch.no_grad():
        logits = torch.cat([forward(source, batch).logits for batch in all_batches(source)])
    first_two = logits.double().sort(descending=True).values[:, :2]
    assert torch.allclose(torch.cat(margins), first_two[:, 0] - first_two[:, 1], atol=1e-5)
    expected = 1.0 - logits.double().softmax(-1).square().sum(-1)
    assert torch.allclose(uncertainties, expected, atol=1e-6)


def test_divergences_of_examples_add_up(pair):
    source, written = pair
    (batch,) = all_batches(source, size=20)
    with torch.no_grad():
        expected, found = forward(source, batch), forward(written, batch)
    each = divergences(expected.logits, found.logits, source.head)
    assert float(sum_by_example(each, expected.counts).sum()) == pytest.approx(
        float(each.sum()), rel=1e-12
    )
    assert len(expected.counts) == 20
    assert int(expected.counts.sum()) == len(expected.logits)
    if source.head is Head.causal_lm:  # the answers of one example are the rows that stand together
        first = int(expected.counts[0])
        assert float(sum_by_example(each, expected.counts)[0]) == pytest.approx(
            float(each[:first].sum()), rel=1e-12
        )


def test_a_large_vocabulary_is_kept_as_what_the_output_layer_reads(pair):
    source, _ = pair
    if source.head is not Head.causal_lm:
        pytest.skip("one answer an example is small as it is")
    (batch,) = all_batches(source, size=20)
    output, form_again = forward_repeatable(source, batch, max_kept_classes=8)
    calls = []
    handle = source.model.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(form_again(), output.logits)
    handle.remove()
    assert not calls  # the model itself was not asked again


def test_where_more_follows_the_output_layer_the_model_is_asked_again(pair):
    source, _ = pair
    if source.head is not Head.causal_lm:
        pytest.skip("only where the output layer is special")
    (batch,) = all_batches(source, size=20)

    def capped(model, arguments, output):
        output.logits = torch.tanh(output.logits)
        return output

    handle = source.model.register_forward_hook(capped)
    output, form_again = forward_repeatable(source, batch, max_kept_classes=8)
    assert torch.equal(form_again(), output.logits)
    assert float(form_again().abs().max()) <= 1.0
    handle.remove()


def test_only_answers_reach_the_output_layer(pair):
    source, _ = pair
    layer = output_layer(source)
    if layer is None:
        pytest.skip("a classifier has no such layer")
    (batch,) = all_batches(source, size=20)
    rows = []
    handle = layer.register_forward_hook(lambda module, given, made: rows.append(made.shape[0]))
    assert len(forward(source, batch).logits) == int(batch["attention_mask"].sum()) - 20
    handle.remove()
    assert rows == [8, 8, int(batch["attention_mask"].sum()) - 20]


def test_no_effect_is_no_share(pair, monkeypatch):
    source, _ = pair
    monkeypatch.setattr(
        sys.modules[Reference.__module__], "without_delta", lambda model: torch.no_grad()
    )
    assert Reference(source, all_batches(source)).compare(source).kept is None
