"""Fine-tuning a language model on JSON lines: metrics are what they say, samples are recorded."""

from __future__ import annotations

import json
from importlib import import_module
from types import SimpleNamespace

import pytest
import typer

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("trl")
pytest.importorskip("accelerate")

from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_language_model import make_base, tiny_model, write_rows  # noqa: E402
from tiny_tokenizer import word_tokenizer  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from lsrdecomp.cli.app import app  # noqa: E402
from lsrdecomp.cli.options import assignment  # noqa: E402
from lsrdecomp.lora.base.dataset import DataError, PromptExample, read_examples  # noqa: E402
from lsrdecomp.lora.base.tokens import TokenizedExample  # noqa: E402
from lsrdecomp.lora.train.finetune_record import read_record  # noqa: E402
from lsrdecomp.lora.train.finetune_run import evaluate, finetune  # noqa: E402
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings, SettingsError  # noqa: E402
from lsrdecomp.lora.train.language import (  # noqa: E402
    LanguageDataset,
    evaluate_language,
    generate,
    overlap,
    read_language,
)
from lsrdecomp.lora.train.trainer import training_arguments  # noqa: E402


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language")
    make_base(folder)
    write_rows(folder / "rows.jsonl", 48)
    return folder


def settings(place, **changes):
    values = {
        "base": str(place / "base"),
        "data": str(place / "rows.jsonl"),
        "device": "cpu",
        "log_every": 0,
    }
    return FinetuneSettings.from_mapping(
        values | {"steps": 40, "learning_rate": 2e-2, "new_tokens": 8} | changes
    )


def test_the_precision_that_auto_stands_for_is_that_of_the_evaluation_too(place, tmp_path):
    losses = []
    for precision in ("auto", "float32"):
        asked = settings(place, steps=2, samples=0, precision=precision)
        record = finetune(asked, tmp_path / precision)
        assert record.settings.precision == "float32"  # on the CPU
        losses.append(record.dev.loss)
    assert losses[0] == losses[1]


def test_a_run_is_recorded_with_what_base_and_adapter_say(place, tmp_path):
    record = finetune(
        settings(place, metric="exact", measure_start=True, samples=2, steps=8), tmp_path / "run"
    )
    assert record.start is not None
    assert record.dev.examples == 5  # a tenth of 48
    assert record.settings.batch == 8
    assert record.baseline == {}
    assert len(record.samples) == 2
    model = AutoModelForCausalLM.from_pretrained(place / "base")
    prompts = [sample.prompt for sample in record.samples]

    def said(model):
        return generate(model, word_tokenizer(), prompts, new_tokens=8, autocast=False)

    assert [sample.base for sample in record.samples] == said(model)
    adapted = PeftModel.from_pretrained(model, tmp_path / "run" / "adapter")
    assert [sample.adapted for sample in record.samples] == said(adapted)
    assert read_record(tmp_path / "run") == record
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert config["task_type"] == "CAUSAL_LM"
    assert sorted(config["target_modules"]) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    again = evaluate(settings(place, metric="exact", init=str(tmp_path / "run" / "adapter")))
    assert again.loss == pytest.approx(record.dev.loss, rel=1e-5)


def test_an_adapter_that_is_trained_on_is_shown_before_and_after(place, tmp_path):
    first = finetune(settings(place, samples=2, steps=8), tmp_path / "first")
    assert [sample.start for sample in first.samples] == [None, None]
    init = str(tmp_path / "first" / "adapter")
    more = finetune(settings(place, init=init, samples=2, steps=8), tmp_path / "more")
    assert more.start.loss == pytest.approx(first.dev.loss, rel=1e-5)
    before = [sample.start for sample in more.samples]
    assert before == [sample.adapted for sample in first.samples]
    assert read_record(tmp_path / "more") == more
    unasked = settings(place, init=init, samples=2, steps=1, measure_start=False)
    assert finetune(unasked, tmp_path / "unasked").samples[0].start is None


def token_lora(folder, indices):
    config = LoraConfig(
        r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", trainable_token_indices=indices
    )
    get_peft_model(tiny_model(), config).save_pretrained(folder)
    return str(folder)


def test_rows_of_tokens_are_trained_beside_the_layers(place, tmp_path):
    init = token_lora(tmp_path / "lora", {"embed_tokens": [4, 5]})
    record = finetune(settings(place, init=init, steps=2, samples=0, log_every=1), tmp_path / "run")
    log = (tmp_path / "run" / "layers.jsonl").read_text().splitlines()
    layers = {json.loads(line)["layer"] for line in log}
    assert layers == {f"model.layers.{i}.self_attn.q_proj" for i in range(2)}
    assert record.head_parameters == 2 * 32
    tensors = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in tensors.items() if "tokens_delta" in name)


def test_rows_of_tokens_in_the_output_layer_are_refused(place, tmp_path):
    init = token_lora(tmp_path / "lora", {"embed_tokens": [4, 5], "lm_head": [4]})
    with pytest.raises(SettingsError, match="trains token rows of the output layer"):
        finetune(settings(place, init=init, steps=2, samples=0), tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["lora"]


def test_an_adapter_names_its_base_as_others_know_it(place, tmp_path, monkeypatch):
    monkeypatch.setattr(
        import_module("lsrdecomp.lora.base.base_files"),
        "packaged_file",
        lambda: place / "base" / "x.gguf",
    )
    monkeypatch.setattr(
        import_module("lsrdecomp.lora.base.base_files"),
        "_dequantized_directory",
        lambda file: file.parent,
    )
    finetune(settings(place, base="smollm2", steps=1, samples=0), tmp_path / "run")
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_early_stopping_judges_by_the_loss_of_tokens(place, tmp_path):
    record = finetune(
        settings(place, patience=2, evaluate_every=3, validation=0.2, steps=9), tmp_path / "run"
    )
    assert record.validation is not None
    assert record.validation.loss is not None
    assert record.best_step in (3, 6, 9)


def test_the_loss_on_the_split_is_the_mean_of_its_tokens_in_batches_of_any_size(
    place, tmp_path, monkeypatch
):
    losses = []
    for size in (64, 3):

        def in_batches(*given, size=size):
            arguments = training_arguments(*given)
            arguments.per_device_eval_batch_size = size
            return arguments

        run = import_module("lsrdecomp.lora.train.finetune_run")
        monkeypatch.setattr(run, "training_arguments", in_batches)
        asked = settings(place, patience=1, evaluate_every=2, validation=0.3, steps=2, samples=0)
        losses.append(finetune(asked, tmp_path / f"{size}").validation.loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_right_means_that_greedy_decoding_gives_the_completion():
    model, tokenizer = tiny_model().eval(), word_tokenizer()
    rows, wrong = [], []
    for prompt in ("user one two", "user three four", "one", "six six"):
        given = tokenizer(prompt, return_tensors="pt")["input_ids"]
        said = model.generate(given, max_new_tokens=4, do_sample=False)[0].tolist()
        answers = (False,) * given.shape[1] + (True,) * (len(said) - given.shape[1])
        rows.append(TokenizedExample(tuple(said), answers))
        wrong.append(TokenizedExample((*said[:-1], (said[-1] + 1) % 14), answers))

    def judged(rows):
        settings = FinetuneSettings("base", "rows.jsonl", metric="exact", precision="float32")
        return evaluate_language(
            model, LanguageDataset(settings, tokenizer, "base", [], [], [], rows)
        )

    found = judged(rows)
    assert found.metrics["exact"] == found.metrics["token_accuracy"] == 1.0
    found = judged([*rows, *wrong])
    assert found.metrics["exact"] == 0.5
    assert 0.5 < found.metrics["token_accuracy"] < 1.0


def test_what_is_generated_does_not_depend_on_the_batch():
    model, tokenizer = tiny_model().eval(), word_tokenizer()
    prompts = ["user one two three", "six", "two two"]
    together = generate(model, tokenizer, prompts, new_tokens=5, autocast=False)
    assert together == [
        generate(model, tokenizer, [one], new_tokens=5, autocast=False)[0] for one in prompts
    ]


def test_bleu_and_chrf_take_every_reference():
    pytest.importorskip("sacrebleu")
    examples = [
        PromptExample(
            "",
            "a very different text",
            "1",
            references=("the cat sat on the mat", "a cat is on a mat"),
        ),
        PromptExample("", " the dog ran all day long", "2"),
    ]
    said = ["the cat sat on the mat", "the dog ran all day long"]
    assert overlap("bleu", said, examples) == pytest.approx(100.0)
    assert overlap("chrf", said, examples) == pytest.approx(100.0)
    assert overlap("chrf", ["", "the dog"], examples) < 50.0


def test_the_command_needs_no_more_than_base_data_and_out(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [
        "finetune",
        "--base",
        place / "base",
        "--data",
        place / "rows.jsonl",
        "--out",
        "my-lora",
    ]
    done = CliRunner().invoke(app, [*map(str, arguments), "--steps", "2", "--device", "cpu"])
    assert done.exception is None, done.output
    for word in ("token_accuracy", "loss", "trained:", "user "):
        assert word in done.output
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(place / "base")
        PeftModel.from_pretrained(base, tmp_path / "my-lora" / "adapter")(torch.tensor([[1, 2]]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("patience=3", ("patience", 3)),
        ("metric=bleu", ("metric", "bleu")),
        ("layers=3,4", ("layers", [3, 4])),
        ("target_modules=q_proj,v_proj", ("target_modules", ["q_proj", "v_proj"])),
        ("train_head=false", ("train_head", False)),
        ("data=a=b.jsonl", ("data", "a=b.jsonl")),
    ],
)
def test_settings_are_written_as_people_write_them(text, expected):
    assert assignment(text, "--set") == expected


@pytest.mark.parametrize("text", ["patience", "=3", ""])
def test_a_setting_without_name_or_value_is_refused(text):
    with pytest.raises(typer.BadParameter, match="expected NAME=VALUE"):
        assignment(text, "--set")


def test_any_setting_is_reached_from_the_command_line(place, tmp_path):
    arguments = [
        "finetune",
        "--base",
        place / "base",
        "--data",
        place / "rows.jsonl",
        "--out",
        tmp_path / "run",
    ]
    more = [
        "--set",
        "dev_examples=3",
        "--set",
        "samples=0",
        "--set",
        "target_modules=q_proj",
        "--set",
        "metric=exact",
    ]
    done = CliRunner().invoke(app, [*map(str, arguments), "--steps", "1", "--device", "cpu", *more])
    assert done.exception is None, done.output
    settings = read_record(tmp_path / "run").settings
    assert (settings.dev_examples, settings.target_modules, settings.metric) == (
        3,
        ("q_proj",),
        "exact",
    )
    done = CliRunner().invoke(
        app, [*map(str, arguments[:-1]), str(tmp_path / "other"), "--set", "patiense=3"]
    )
    assert isinstance(done.exception, SettingsError)
    assert "no setting is called 'patiense'; did you mean 'patience'? known: base, data" in str(
        done.exception
    )
    done = CliRunner().invoke(
        app, [*map(str, arguments[:-1]), str(tmp_path / "other"), "--optimizer", "nonesuch"]
    )
    assert isinstance(done.exception, SettingsError)
    assert "nonesuch" in str(done.exception)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"data": None}, SettingsError, "data must be a text that is not empty, got None"),
        (
            {"metric": "rouge"},
            SettingsError,
            "metric must be one of loss, exact, bleu, chrf, got 'rouge'",
        ),
        ({"method": "head"}, SettingsError, "a language model has no head to train"),
        ({"max_length": 6}, DataError, "tokens, more than the length of 6"),
        (
            {"task": "classes", "metric": "bleu"},
            SettingsError,
            "metric, new_tokens: for a language model",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_line(place, tmp_path, changes, error, says):
    with pytest.raises(error, match=says):
        finetune(settings(place, **changes), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_references_must_be_texts(tmp_path):
    (tmp_path / "r.jsonl").write_text('{"text": "one", "references": "two"}\n')
    with pytest.raises(DataError, match='line 1: "references" must be a list of texts'):
        read_examples(tmp_path / "r.jsonl")


def test_pieces_of_a_batch_are_the_same_steps(place, tmp_path):
    """Pieces hold different numbers of answers, so a mean of their means would be another loss."""
    short = {"steps": 4, "learning_rate": 1e-3, "log_every": 1}
    whole = finetune(settings(place, **short), tmp_path / "whole")
    pieces = finetune(settings(place, **short, accumulate=4), tmp_path / "pieces")
    assert [step for step, _ in pieces.losses] == [1, 2, 3, 4]
    assert [loss for _, loss in pieces.losses] == pytest.approx(
        [loss for _, loss in whole.losses], rel=1e-3
    )
    assert pieces.dev.loss == pytest.approx(whole.dev.loss, rel=1e-4)
    with pytest.raises(
        SettingsError, match="batch = 8 cannot be shared by 1 processes in 3 pieces each"
    ):
        finetune(settings(place, accumulate=3), tmp_path / "thirds")


def test_packed_examples_do_not_see_each_other(place):
    """A row of several examples gives the loss of each of them alone."""
    unpacked, packed = (
        read_language(settings(place, packing=packing, max_length=64)) for packing in (False, True)
    )
    assert len(packed.train) < len(unpacked.train)
    assert sum(packed.lengths) == sum(unpacked.lengths)
    model, tokenizer = tiny_model().eval(), unpacked.tokenizer
    losses = []
    for data in (unpacked, packed):
        batch = data.collator(tokenizer)(list(data.train))
        labels = batch.pop("labels")
        with torch.no_grad():
            logits = model(**batch, use_cache=False).logits[:, :-1]
        losses.append(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        )
    torch.testing.assert_close(*losses)


def test_training_is_set_in_the_words_of_transformers(place, tmp_path):
    words = {"optimizer": "adafactor", "scheduler": "cosine", "weight_decay": 0.1, "warmup": 0.5}
    record = finetune(settings(place, **words, steps=2, samples=0), tmp_path / "run")
    assert record.dev.loss is not None
    chosen = training_arguments(record.settings, tmp_path, steps=10, epoch_steps=5)
    assert (chosen.optim, chosen.lr_scheduler_type, chosen.weight_decay) == (
        "adafactor",
        "cosine",
        0.1,
    )
    assert (chosen.warmup_steps, chosen.bf16) == (5, False)
    for word in ("optimizer", "scheduler"):
        with pytest.raises(SettingsError, match="nonesuch"):
            finetune(settings(place, **{word: "nonesuch"}, steps=1), tmp_path / word)


def test_activations_are_recomputed_where_memory_asks_for_it(place, tmp_path, monkeypatch):
    for free, again in ((10**12, False), (10**3, True)):
        monkeypatch.setattr(
            "psutil.virtual_memory", lambda free=free: SimpleNamespace(available=free)
        )
        record = finetune(settings(place, steps=1, samples=0), tmp_path / str(again))
        assert record.settings.gradient_checkpointing is again
