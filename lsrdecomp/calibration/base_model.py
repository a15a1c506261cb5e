"""Opening a base with an adapter, and turning texts into the batches it reads: what calibration starts from."""

from __future__ import annotations

import copy
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import lsrdecomp.adapters  # noqa: F401 (teaches PEFT to open LSR directories)
from lsrdecomp.adapters.geometry import LINEAR
from lsrdecomp.calibration.bases import find_base, open_tokenizer
from lsrdecomp.calibration.dataset import (
    ANSWERS,
    TEXT_LENGTH,
    DataError,
    Example,
    PromptExample,
    token_batches,
    tokenize,
)
from lsrdecomp.calibration.errors import CalibrationError
from lsrdecomp.calibration.experts import with_lora
from lsrdecomp.calibration.heads import IGNORED_LABEL, Head
from lsrdecomp.checkpoints.files import read_text_lines, sha256
from lsrdecomp.checkpoints.tensors import first_line, read_header
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Text = tuple[str, str | None]

LOADERS = {
    "SEQ_CLS": (AutoModelForSequenceClassification, Head.classification),
    "TOKEN_CLS": (AutoModelForTokenClassification, Head.tokens),
    "CAUSAL_LM": (AutoModelForCausalLM, Head.causal_lm),
    "SEQ_2_SEQ_LM": (AutoModelForSeq2SeqLM, Head.seq2seq),
}
DTYPES = ("float32", "bfloat16")
HEADS = (
    "classifier.weight",
    "score.weight",
    "classifier.out_proj.weight",
    "classification_head.out_proj.weight",
)


@dataclass(frozen=True, slots=True)
class Base:
    """A base as an adapter's task wants it, plain or with an adapter active, ready to be calibrated."""

    name: str
    model: nn.Module
    tokenizer: Any
    head: Head
    modules: tuple[str, ...] = ()  # the adapted layers, by their names in the plain base
    adapter_base: str = ""  # what the adapter's config calls its base
    adapter_sha256: str = ""  # of the adapter's weight file

    def adapted(self, adapter: str | Path) -> Base:
        """With an adapter of any kind PEFT opens; raises `CheckpointError` if it does not fit."""
        # Heads and biases are what an adapter may overwrite; the rest of the base stays as it is
        # and can be shared.
        shared = {
            id(p): p
            for name, p in self.model.named_parameters()
            if p.ndim > 1 and not name.endswith(HEADS)
        }
        try:
            base = copy.deepcopy(self.model, shared)
            model = with_lora(base, adapter)
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"does not fit {self.name}: {first_line(error)}", path=adapter
            ) from error
        declared = str(model.peft_config["default"].base_model_name_or_path or "")
        weights = Path(adapter) / WEIGHTS
        digest = sha256(weights) if weights.is_file() else ""
        model = model.to(next(self.model.parameters()).device).eval()
        return Base(
            self.name, model, self.tokenizer, self.head, adapted_modules(model), declared, digest
        )


def load_base(
    base: str | Path, adapter: str | Path, *, dtype: str = "float32", device: str = "cpu"
) -> Base:
    """Open a base by name or directory, put an adapter on it, and find the layers the adapter changes.

    Parameters
    ----------
    base : str or path
        As `transformers` takes it, a GGUF file, or ``"smollm2"``; see
        `calibration.bases.find_base`.
    adapter : path
        A PEFT directory: LoRA, LSR or any other kind PEFT opens.
    dtype, device : str
        Precision and place of the base.

    Raises
    ------
    CheckpointError
        If the adapter's head does not fit, or its task type is none of `LOADERS`.
    """
    return open_base(base, adapter, dtype=dtype, device=device).adapted(adapter)


def load_pair(
    base: str | Path,
    source: str | Path,
    written: str | Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
) -> tuple[Base, Base]:
    """The same base twice, once with each adapter; its large weights are held once.

    Parameters
    ----------
    base : str or path
    source, written : path
        PEFT directories of one task type, of any kinds PEFT opens.

    Raises
    ------
    CheckpointError
        As `load_base`; and if ``source`` brings a head that ``written`` lacks, so that its answers
        would be noise.
    """
    if _labels(source) != _labels(written):
        heads = " and ".join(
            f"{_labels(each).get('num_labels', 'no')} labels in {each}"
            for each in (source, written)
        )
        raise CheckpointError(
            f"the adapters have different heads, {heads}; their answers cannot be compared"
        )
    opened = open_base(base, source, dtype=dtype, device=device)
    return opened.adapted(source), opened.adapted(written)


def open_base(
    base: str | Path, adapter: str | Path, *, dtype: str = "float32", device: str = "cpu"
) -> Base:
    """The plain base for adapters of the task of ``adapter``; arguments and errors as `load_base`."""
    adapter = Path(adapter)
    if not (adapter / "adapter_config.json").is_file():
        text = "has no adapter_config.json, so it is no adapter of PEFT, and bases are run for PEFT's of text models only"
        way_out = f"make a LoRA file smaller without one: lsrdecomp compress {shlex.quote(str(adapter))} --ratio 4"
        raise CheckpointError(f"{text}; {way_out} --out small.safetensors", path=adapter)
    # 1. The task, from the adapter's own config: it says which class of model reads the base's
    # files.
    try:
        config = PeftConfig.from_pretrained(str(adapter))
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"is no adapter that PEFT opens: {first_line(error)}", path=adapter
        ) from error
    kind = str(getattr(config.task_type, "value", config.task_type))
    if kind not in LOADERS:
        text = f"task type {kind!r} is not one of {', '.join(LOADERS)}: only text models can be calibrated"
        way_out = 'if it is one, write "task_type": "CAUSAL_LM" or another into adapter_config.json'
        raise CheckpointError(f"{text} (a diffusion model's has none); {way_out}", path=adapter)
    # 2. The base, with a head of as many classes as the adapter brings, or its own.
    loader, head = LOADERS[kind]
    labels = {} if head in (Head.causal_lm, Head.seq2seq) else _labels(adapter)
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}", path=base)
    model, tokenizer = load_model(loader, base, dtype=getattr(torch, dtype), **labels)
    if head is Head.classification and model.config.num_labels == 1:
        head = Head.regression  # one class is a score
    return Base(str(base), model.to(device), tokenizer, head)


def load_model(loader: Any, base: str | Path, **options: Any) -> tuple[Any, Any]:
    """A base as a class of transformers opens it, with the padding token that batches need, and its tokenizer.

    Raises `CheckpointError` if one of the two cannot be opened.
    """
    directory = find_base(base)
    try:
        model = loader.from_pretrained(directory, **options)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"no base could be opened: {first_line(error)}", path=base) from error
    tokenizer = open_tokenizer(base)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def adapted_modules(model: PeftModel) -> tuple[str, ...]:
    """Names, in the plain base, of the Linear layers that a PEFT model adapts."""
    named = model.get_base_model().named_modules(remove_duplicate=False)
    return tuple(
        name
        for name, module in named
        if has_delta(module) and isinstance(module.get_base_layer(), LINEAR)
    )


def has_delta(module: nn.Module) -> TypeGuard[BaseTunerLayer]:
    """Whether an adapter adds a ΔW to it; rows of single tokens, which PEFT trains beside one, are none."""
    return isinstance(module, BaseTunerLayer) and not isinstance(module, TrainableTokensLayer)


def batches(
    base: Base, texts: Sequence[Text], *, size: int, max_length: int | None = None, seed: int
) -> Iterator[dict[str, Tensor]]:
    """Texts in random order, as the model reads them; for seq2seq the second text is the output.

    What goes beyond ``max_length`` tokens (`TEXT_LENGTH` if absent) is cut.

    The order depends on ``seed`` alone, so an interrupted calibration finds its place again.

    Raises
    ------
    CalibrationError
        If a seq2seq text has no output.
    """
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    length = max_length or TEXT_LENGTH
    settings = {"padding": True, "truncation": True, "max_length": length, "return_tensors": "pt"}
    # Pairs are read as two segments where every text of their batch is a pair.
    for start in range(0, len(order), size):
        rows = [texts[i] for i in order[start : start + size]]
        first, second = [row[0] for row in rows], [row[1] for row in rows]
        if base.head is not Head.seq2seq:
            pairs = None if any(text is None for text in second) else second
            yield dict(base.tokenizer(first, pairs, **settings))
            continue
        if any(text is None for text in second):
            raise CalibrationError("a seq2seq model needs pairs: input, a tab, output on each line")
        read = dict(base.tokenizer(first, **settings))
        outputs = base.tokenizer(text_target=second, **settings)
        yield read | {
            "labels": outputs["input_ids"].masked_fill(
                outputs["attention_mask"] == 0, IGNORED_LABEL
            )
        }


def prompt_batches(
    base: Base,
    examples: Sequence[PromptExample],
    *,
    size: int,
    seed: int,
    max_length: int | None = None,
    answers: str = "completion",
    truncate: bool = False,
) -> Iterator[dict[str, Tensor]]:
    """Examples of a JSON-lines file in random order, as the model reads them.

    A causal model reads prompt and completion as one, and ``loss_mask`` says which tokens are
    answers; a seq2seq model reads the prompt and is to say the completion; any other reads the two
    as a pair, a plain text alone.

    Raises
    ------
    DataError
        As `tokenize`, of a causal model; of any other if an example is a conversation.
    """
    if base.head is Head.causal_lm:
        rows = tokenize(
            examples, base.tokenizer, max_length=max_length, answers=answers, truncate=truncate
        )
        return token_batches(rows, size=size, seed=seed, pad=base.tokenizer.pad_token_id)
    if answers not in ANSWERS:
        raise DataError(f"answers must be one of {', '.join(ANSWERS)}, got {answers!r}")
    spoken = next((example for example in examples if example.messages), None)
    if spoken is not None:
        raise DataError(
            f'{spoken.where}: "messages" are for causal language models, and {base.name} is none'
        )
    texts: list[Text] = [
        (each.prompt, each.completion) if each.prompt else (each.completion, None)
        for each in examples
    ]
    return batches(base, texts, size=size, max_length=max_length, seed=seed)


def read_lines(file: str | Path) -> list[Text]:
    """One text per line, or two with a tab between; empty lines are left out.

    Raises
    ------
    CheckpointError
        As `lsrdecomp.checkpoints.files.read_text_lines`.
    """
    split = [line.partition("\t") for line in read_text_lines(Path(file))]
    return [(first, second or None) for first, _, second in split]


def task_texts(examples: Sequence[Example]) -> list[Text]:
    """What a classification task's examples say; choices of one question count as texts of their own."""
    return [choice for example in examples for choice in example.choices]


def _labels(adapter: str | Path) -> dict[str, int]:
    """How many classes the saved head has, as an argument; empty if none was saved, so that the base's own counts."""
    file = Path(adapter) / WEIGHTS
    if not file.exists():
        return {}
    heads = [tensor for name, tensor in read_header(file).tensors.items() if name.endswith(HEADS)]
    return {"num_labels": heads[0].shape[0]} if heads else {}
