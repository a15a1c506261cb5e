"""What a form answers in words: completions of held-out prompts, by greedy decoding."""

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from tiny_bases import write_directories  # noqa: E402

from lsrdecomp.lora.base.dataset import PromptExample  # noqa: E402
from lsrdecomp.lora.measure.evaluator import Evaluator  # noqa: E402
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
    evaluator.held_out = [("w1 w2", None)]
    assert evaluator.compare_answers(folder / "lora") == []
