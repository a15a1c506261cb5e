"""A tokenizer of whole words for tests that must not download one."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

MARKS = ("<pad>", "<s>", "</s>", "<unk>", "<turn>", "<end>")
WORDS = ("one", "two", "three", "four", "five", "six", "user", "assistant")


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Every text begins with ``<s>``; ``</s>`` is the end-of-text token and is never added."""
    known = [*MARKS, *WORDS]
    tokenizer = Tokenizer(
        WordLevel({word: index for index, word in enumerate(known)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", known.index("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
