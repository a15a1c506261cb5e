"""The functional check: divergence and agreement of two adapters' answers on one base."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from tiny_bases import TEXTS, open_pair, write_directories  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from lsrdecomp.cli.app import app  # noqa: E402
from lsrdecomp.errors import (  # noqa: E402
    CalibrationError,
    LsrError,
)
from lsrdecomp.lora.base.batches import text_batches  # noqa: E402
from lsrdecomp.lora.base.divergence import Reference, divergences, without_delta  # noqa: E402
from lsrdecomp.lora.base.heads import Head  # noqa: E402
from lsrdecomp.lora.base.open_bases import load_base  # noqa: E402


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return write_directories(tmp_path_factory.mktemp("classifier"), "SEQ_CLS")


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    return write_directories(tmp_path_factory.mktemp("language"), "CAUSAL_LM")


def behaviour(folder, written, size=6):
    source, other = open_pair(folder / "base", folder / "lora", folder / written)
    return Reference(source, text_batches(source, TEXTS, size=size, max_length=16, seed=0)).compare(
        other
    )


def logits(folder, written):
    """Of each text alone, without padding, from weights that ΔW was added to."""
    opened = load_base(folder / "base", folder / written)
    merged = opened.model.merge_and_unload()
    tokens = [opened.tokenizer([text], return_tensors="pt")["input_ids"] for text, _ in TEXTS]
    with torch.no_grad():
        return [merged(input_ids=each).logits.double() for each in tokens]


def test_kl_and_agreement_of_a_classifier_are_those_of_merged_weights(classifier):
    found = behaviour(classifier, "lsr")
    old, new = (torch.cat(logits(classifier, name)) for name in ("lora", "lsr"))
    expected = torch.nn.functional.kl_div(
        new.log_softmax(-1), old.log_softmax(-1), log_target=True, reduction="sum"
    )
    assert (found.examples, found.answers, found.unit) == (20, 20, "example")
    assert found.exact_match_rate is None
    assert found.kl == pytest.approx(float(expected) / 20, rel=1e-4)
    assert found.agreement == float((old.argmax(-1) == new.argmax(-1)).double().mean())


def test_a_language_model_answers_once_for_every_token_that_has_a_next_one(language_model):
    found = behaviour(language_model, "lsr")
    divergence = 0.0
    matches = []
    for p, q in zip(logits(language_model, "lora"), logits(language_model, "lsr"), strict=True):
        log_p, log_q = p[0, :-1].log_softmax(-1), q[0, :-1].log_softmax(-1)
        divergence += float((log_p.exp() * (log_p - log_q)).sum())
        matches.append(log_p.argmax(-1) == log_q.argmax(-1))
    n_matching, n_tokens = int(torch.cat(matches).sum()), len(torch.cat(matches))
    n_exact = sum(bool(text.all()) for text in matches)
    assert (found.answers, found.unit) == (n_tokens, "token")
    assert found.kl == pytest.approx(divergence / n_tokens, rel=1e-4)
    assert found.agreement == n_matching / n_tokens
    assert found.exact_match_rate == n_exact / len(TEXTS)
    assert 0 < n_exact < len(TEXTS)  # else the rate would tell nothing


@pytest.mark.parametrize("kind", ["classifier", "language_model"])
def test_the_same_adapter_in_another_format_answers_the_same(kind, request):
    found = behaviour(request.getfixturevalue(kind), "same")
    assert found.kl < 1e-6 < 1e-3 < found.effect
    assert found.agreement == 1.0
    assert found.kept > 0.999


def test_the_effect_is_the_divergence_from_the_base_with_the_adapters_head(classifier):
    base = load_base(classifier / "base", classifier / "lora")
    (batch,) = text_batches(base, TEXTS, size=20, max_length=16, seed=0)
    with torch.no_grad():
        with without_delta(base.model):
            plain = base.model(**batch).logits
        adapted = base.model(**batch).logits
        for module in base.model.modules():
            if hasattr(module, "lora_B"):
                module.lora_B["default"].weight.zero_()
        torch.testing.assert_close(plain, base.model(**batch).logits)
    found = behaviour(classifier, "lsr")
    assert found.effect == pytest.approx(
        float(divergences(adapted, plain, Head.classification).sum()) / 20, rel=1e-4
    )


def test_a_regression_differs_by_half_the_squared_difference(tmp_path):
    folder = write_directories(tmp_path, "SEQ_CLS", labels=1)
    found = behaviour(folder, "lsr")
    old, new = (torch.cat(logits(folder, name)) for name in ("lora", "lsr"))
    assert found.kl == pytest.approx(float((old - new).square().mean()) / 2, rel=1e-4)
    assert found.agreement is None


def test_many_classes_are_counted_in_parts():
    torch.manual_seed(0)
    old, new = torch.randn(2, 11, 7)
    whole = float(divergences(old, new, Head.classification).sum())
    in_parts = divergences(old, new, Head.classification, at_a_time=2)
    assert float(in_parts.sum()) == pytest.approx(whole, rel=1e-12)


def test_two_adapters_share_the_weights_of_the_base_but_not_its_heads(classifier):
    first, second = open_pair(classifier / "base", classifier / "lora", classifier / "lsr")
    name = "bert.encoder.layer.1.output.dense"
    one, other = (
        each.model.get_base_model().get_submodule(name).weight for each in (first, second)
    )
    assert one.data_ptr() == other.data_ptr()
    one, other = (
        each.model.get_base_model().classifier.original_module.weight for each in (first, second)
    )
    assert one.data_ptr() != other.data_ptr()


def test_no_texts_are_no_answer(classifier):
    source = load_base(classifier / "base", classifier / "lora")
    with pytest.raises(CalibrationError, match="nothing to predict"):
        Reference(source, [])


def test_measure_on_the_command_line(classifier, tmp_path):
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(text for text, _ in TEXTS))
    arguments = ["measure", classifier / "lora", classifier / "lsr", "--base", classifier / "base"]
    done = CliRunner().invoke(app, [*map(str, arguments), "--data", str(lines)])
    found = behaviour(classifier, "lsr")
    share = f"{100 * found.kept:.1f} ± {100 * found.standard_error:.1f} %"
    assert f"keeps {share} of the LoRA's effect on 20 held-out texts of lines.txt" in done.stdout
    kl = f"KL to the LoRA {found.kl:.3g} nats per example, {found.effect:.3g} without an adapter"
    assert kl in done.stdout
    n_matching = round(20 * found.agreement)
    assert f"It gives the LoRA's class to {n_matching} of 20 held-out texts" in done.stdout
    done = CliRunner().invoke(app, [*map(str, arguments), "--data", str(lines), "--json", "-"])
    answers = json.loads(done.stdout)["fidelity"]
    assert answers["kl"] == pytest.approx(found.kl, rel=1e-6)
    # It is one minus a ratio of two such figures.
    assert answers["kept"] == pytest.approx(found.kept, abs=2e-6)


def test_verify_runs_no_base(classifier):
    arguments = ["verify", str(classifier / "lora"), str(classifier / "lsr"), "--base", "anything"]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, LsrError)
    assert "outputs are compared by lsrdecomp measure" in str(done.exception)
