"""What a version answers in words: greedy answers to held-out prompts, whole and word for word."""

import random
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from tiny_bases import write_directories  # noqa: E402

from lsrdecomp.lora.base.dataset import PromptExample  # noqa: E402
from lsrdecomp.lora.base.generation import greedy_answers  # noqa: E402
from lsrdecomp.lora.base.open_bases import load_base  # noqa: E402
from lsrdecomp.lora.measure import served_outputs  # noqa: E402
from lsrdecomp.lora.measure.evaluator import Evaluator  # noqa: E402
from lsrdecomp.lora.measure.output_meter import N_OTHER_PROMPTS, Meter  # noqa: E402
from lsrdecomp.lora.search.measured_settings import EvaluatorSettings  # noqa: E402

WORDS = random.Random(0)


def test_prompts_are_completed_by_both_and_plain_texts_by_none(tmp_path):
    folder = write_directories(tmp_path, "CAUSAL_LM")
    texts = [
        PromptExample(f"w{i % 30} w{i // 30}", f" w{WORDS.randrange(30)} w1", f"line {i}")
        for i in range(48)
    ]
    evaluator = Evaluator(folder / "base", folder / "lora", texts, EvaluatorSettings(batch=8))
    same = evaluator.compare_answers(folder / "lora")
    assert [each.question for each in same] == [text.prompt for text in evaluator.held_out]
    assert all(each.matches for each in same)
    assert any(each.lora for each in same)
    assert evaluator.compare_answers(folder / "lora", limit=3) == same[:3]
    evaluator.held_out = [PromptExample("", " w1", "a line"), evaluator.held_out[0]]
    assert evaluator.compare_answers(folder / "lora") == same[:1]
    evaluator.held_out = [("w1 w2", None)]
    assert evaluator.compare_answers(folder / "lora") == []


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    return write_directories(tmp_path_factory.mktemp("causal"), "CAUSAL_LM")


@pytest.fixture(scope="module")
def meter(language_model):
    prompts = [f"w{i % 30} w{(7 * i) % 30} w{i // 3}" for i in range(20)]
    texts = [PromptExample(prompt, " w1 w2 w3 w4", prompt) for prompt in prompts]
    source = load_base(language_model / "base", language_model / "lora")
    return Meter(source, texts, EvaluatorSettings(batch=8))


def test_one_pass_finds_the_answers_that_come_word_for_word(language_model, meter):
    version = load_base(language_model / "base", language_model / "lsr")
    rows, _ = meter.own_answers()
    same = 0
    for row in rows:
        start = row.loss_mask.index(True)
        (answer,) = greedy_answers(
            version.model,
            version.tokenizer,
            [row.ids[:start]],
            new_tokens=len(row) - start,
            batch_size=1,
        )
        same += tuple(answer) == row.ids[start:]
    found = meter.whole_answers(version)
    assert (found.answered, found.n_matching) == (20, same)
    assert 0 < same < 20  # else the count would tell nothing
    own = meter.whole_answers(meter.source)
    assert (own.answered, own.n_matching) == (20, 20)
    assert own.prompt_kept == pytest.approx(1.0)


def test_a_blind_adapter_keeps_nothing_of_what_depends_on_the_prompt(language_model, meter):
    version = load_base(language_model / "base", language_model / "lsr")
    rows, reference = meter.own_answers()
    prompts = [row.ids[: row.loss_mask.index(True)] for row in rows]
    generator = random.Random(0)
    lost, blind = 0.0, 0.0
    for index, row in enumerate(rows[:16]):
        prompt = prompts[index]
        others = generator.sample(sorted(set(prompts) - {prompt}), N_OTHER_PROMPTS)
        answer = row.ids[len(prompt) :]
        by_lora = _distributions(meter.source, prompt, answer)
        by_version = _distributions(version, prompt, answer)
        mean = torch.stack([_distributions(meter.source, other, answer) for other in others])
        lost += float((by_lora * (by_lora / by_version).log()).sum())
        blind += float((by_lora * (by_lora / mean.mean(0)).log()).sum())
    found = meter.whole_answers(version)
    assert found.prompt_kept == pytest.approx(1.0 - lost / blind, rel=1e-4)
    assert 0.0 < found.prompt_error < 1.0
    # Of the whole effect, which is the form of an answer as well, more is kept.
    assert reference.compare(version).kept != pytest.approx(found.prompt_kept, abs=1e-3)


@torch.no_grad()
def _distributions(base, prompt, answer):
    """Return the probabilities of each token of an answer after a prompt."""
    logits = base.model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].double()
    return logits[len(prompt) - 1 : -1].softmax(-1)


def test_where_no_answer_depends_on_its_prompt_no_share_of_that_is_given(language_model):
    texts = [PromptExample("w1 w2", f" w3 w{i}", f"line {i}") for i in range(9)]
    source = load_base(language_model / "base", language_model / "lora")
    found = Meter(source, texts, EvaluatorSettings()).whole_answers(source)
    assert (found.answered, found.n_matching) == (1, 1)  # one prompt, with nine completions
    assert (found.prompt_kept, found.prompt_error) == (None, None)


def test_a_server_that_is_the_lora_keeps_all_and_is_asked_no_more_than_so_much(meter, monkeypatch):
    def ask(ids, adapted):
        with torch.no_grad():
            logits = meter.source.model(input_ids=torch.tensor([list(ids)])).logits[0, -1]
        logprobs = logits.double().log_softmax(-1)
        return {int(token): float(logprobs[token]) for token in logprobs.topk(5).indices}

    rows, _ = meter.own_answers()
    asked = []

    def complete(ids, limit):
        row = rows[len(asked)]
        assert (row.ids[: len(ids)], len(row) - len(ids)) == (ids, limit)
        asked.append(ids)
        return meter.source.tokenizer.decode(row.ids[len(ids) :], skip_special_tokens=True)

    monkeypatch.setattr(served_outputs, "MAX_ASKED", 3)
    server = served_outputs.ServedOutputs(SimpleNamespace(ask=ask, complete=complete), meter)
    matches = server.whole_answers()
    assert (len(asked), matches.answered, matches.n_matching) == (3, 3, 3)
    behaviour = server.compare()
    assert behaviour.examples == 3
    assert behaviour.agreement == 1.0
    assert abs(behaviour.kl) < 1e-5
    assert behaviour.effect > 0.0
