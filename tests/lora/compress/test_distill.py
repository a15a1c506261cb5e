"""Distillation: a compressed adapter comes nearer to its LoRA's logits and loses nothing."""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("transformers")

import processes  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tiny_bases import open_pair, write_directories  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from lsrdecomp import compress  # noqa: E402
from lsrdecomp.cli.app import app  # noqa: E402
from lsrdecomp.errors import (  # noqa: E402
    CalibrationError,
    CheckpointError,
    LsrError,
)
from lsrdecomp.lora.base import autocast as mixed_precision  # noqa: E402
from lsrdecomp.lora.base.dataset import DataError, PromptExample  # noqa: E402
from lsrdecomp.lora.base.divergence import Reference, divergences  # noqa: E402
from lsrdecomp.lora.base.heads import Head  # noqa: E402
from lsrdecomp.lora.base.texts import split_texts  # noqa: E402
from lsrdecomp.lora.compress import export_lora, variants  # noqa: E402
from lsrdecomp.lora.compress.distill_lora import distill  # noqa: E402
from lsrdecomp.lora.compress.distill_settings import DistillSettings  # noqa: E402
from lsrdecomp.lora.compress.rewrite import rewrite  # noqa: E402
from lsrdecomp.lora.compress.variants import distill_variant, products_of  # noqa: E402
from lsrdecomp.lora.files import Journal, open_checkpoint  # noqa: E402
from lsrdecomp.lora.files.packed_index import split_tensor, stored_layers  # noqa: E402
from lsrdecomp.lora.measure import evaluator as evaluate  # noqa: E402
from lsrdecomp.lora.measure import verify  # noqa: E402
from lsrdecomp.lora.measure.evaluator import Evaluator  # noqa: E402
from lsrdecomp.lora.measure.features import forward_with_features  # noqa: E402
from lsrdecomp.lora.measure.teacher import DistillationData, teacher_batch  # noqa: E402
from lsrdecomp.lora.peft.layer import LsrLayer  # noqa: E402
from lsrdecomp.lora.search import CompressionPlan  # noqa: E402
from lsrdecomp.lora.search.measured_settings import EvaluatorSettings  # noqa: E402
from lsrdecomp.lora.train.distill_schedule import MAX_TRIALS  # noqa: E402
from lsrdecomp.lora.train.distill_state import TrainingState  # noqa: E402
from lsrdecomp.lora.train.distill_trainer import Trainer, kl_loss, trainable_factors  # noqa: E402
from lsrdecomp.lora.train.distillation import distill_factors  # noqa: E402
from lsrdecomp.lora.train.factor_rounding import FactorRounding  # noqa: E402

WORDS = random.Random(0)
READ = DistillSettings(batch=8, max_length=16)
TEXTS = [(" ".join(f"w{WORDS.randrange(30)}" for _ in range(3 + i % 6)), None) for i in range(96)]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return write_directories(tmp_path_factory.mktemp("classifier"), "SEQ_CLS")


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    return write_directories(tmp_path_factory.mktemp("language"), "CAUSAL_LM")


def run(folder, directory, **settings):
    given = {"base": folder / "base", "data": TEXTS, "teacher": folder / "lora"}
    given |= {"steps": 24, "learning_rate": 0.03, "settings": READ} | settings
    return distill(directory, **given)


def weakened(folder, out):
    """Write the LoRA with each number of its factors at four fifths: the lesson is known."""
    compress(open_checkpoint(folder / "lora"), CompressionPlan(separation_rank=8)).save(out)
    file = out / "adapter_model.safetensors"
    tensors = load_file(file)
    numbers, _ = split_tensor(tensors["lsr"].numpy())
    torch.from_numpy(numbers).view(torch.float32).mul_(0.8)
    save_file(tensors, file, {"format": "pt"})
    return out


@pytest.mark.parametrize("kind", ["classifier", "language_model"])
def test_a_distilled_adapter_keeps_more_and_says_how_much(
    kind, request, tmp_path_factory, tmp_path
):
    folder = request.getfixturevalue(kind)
    done = run(
        folder,
        weakened(folder, tmp_path_factory.mktemp("weak") / "lsr"),
        out=tmp_path / "distilled",
    )
    assert done.variant.after.kept > done.variant.before.kept + 0.02
    assert done.fidelity.kept == done.variant.after.kept
    again = Evaluator(
        folder / "base", folder / "lora", TEXTS, EvaluatorSettings(batch=8, max_length=16)
    ).measure(tmp_path / "distilled")
    # Figures are of the files, not of the training run.
    assert again.kept == pytest.approx(done.fidelity.kept, abs=1e-6)
    record = json.loads((tmp_path / "distilled" / "compression.json").read_text())
    assert record["promise"]["kept"] == done.fidelity.kept
    assert done.fidelity.sentence() in (tmp_path / "distilled" / "README.md").read_text()
    checked = verify(open_checkpoint(folder / "lora"), open_checkpoint(tmp_path / "distilled"))
    assert checked.passed
    assert [path.name for path in tmp_path.iterdir()] == ["distilled"]


@pytest.mark.parametrize("storage", ["float16", "int8", "int4"])
def test_a_distilled_variant_keeps_its_storage_and_its_size(
    classifier, tmp_path, storage, monkeypatch
):
    measure = Evaluator.measure

    def best(evaluator, path):  # the trained form: it is kept, whatever a few steps bring
        behaviour = measure(evaluator, path)
        return behaviour if path == tmp_path / "made" else replace(behaviour, kl=0.0)

    trained = {}

    def kept_in_mind(out, written, source, products, **options):
        trained.update(products)
        return rewrite(out, written, source, products, **options)

    monkeypatch.setattr(Evaluator, "measure", best)
    monkeypatch.setattr(variants, "rewrite", kept_in_mind)
    lora = open_checkpoint(classifier / "lora")
    compress(lora, CompressionPlan(separation_rank=2, storage=storage)).save(tmp_path / "made")
    before = open_checkpoint(tmp_path / "made")
    done = run(classifier, tmp_path / "made", steps=6)
    after = open_checkpoint(tmp_path / "made")
    assert done.variant.steps > 0
    assert [layer.dtype for layer in after.layers] == [layer.dtype for layer in before.layers] != []
    assert after.adapter_parameters == before.adapter_parameters
    assert verify(lora, after).passed
    # What training left is what is written: codes were trained as codes.
    assert set(trained) == {layer.name for layer in after.layers}
    for name, stored in stored_layers(after).items():
        matrix = trained[name].to_matrix()
        error = np.linalg.norm(stored.dequantized().to_matrix() - matrix)
        assert error <= 1e-3 * np.linalg.norm(matrix)


def test_a_variant_that_cannot_become_better_stays_as_it_is(classifier, tmp_path):
    lora = open_checkpoint(classifier / "lora")
    compress(lora, CompressionPlan(separation_rank=8)).save(tmp_path / "whole")
    before = (tmp_path / "whole" / "adapter_model.safetensors").read_bytes()
    done = run(classifier, tmp_path / "whole", learning_rate=0.5, steps=6)  # far too fast
    assert done.variant.after.kl >= done.variant.before.kl
    assert done.variant.steps == 0
    assert done.fidelity.kept == done.variant.before.kept
    assert (tmp_path / "whole" / "adapter_model.safetensors").read_bytes() == before


class Killed(BaseException):
    pass


def states_saved(monkeypatch):
    """The steps after which training saves its state, in a list that grows as it does."""
    saved, save = [], TrainingState.save

    def watched(state, *given):
        save(state, *given)
        saved.append(state.step)

    monkeypatch.setattr(TrainingState, "save", watched)
    return saved


def stop_after(saved):
    def stop(step):
        if saved:
            raise Killed

    return stop


def test_a_killed_run_goes_on_and_ends_where_it_would_have(classifier, tmp_path, monkeypatch):
    whole = run(classifier, classifier / "lsr", out=tmp_path / "whole")
    saved = states_saved(monkeypatch)
    shutil.copytree(classifier / "lsr", tmp_path / "mine")
    before = (tmp_path / "mine" / "adapter_model.safetensors").read_bytes()
    with pytest.raises(Killed):
        run(classifier, tmp_path / "mine", on_step=stop_after(saved))
    assert (tmp_path / "mine" / "adapter_model.safetensors").read_bytes() == before
    assert list((tmp_path / ".mine.journal").glob("*.safetensors"))
    seen = []
    done = run(classifier, tmp_path / "mine", on_step=seen.append)
    assert steps_told(seen)[0] == saved[0] + 1
    checks = [dict(each.variant.training.checks) for each in (done, whole)]
    assert checks[0] == pytest.approx(checks[1], abs=1e-5)
    assert done.fidelity.kept == pytest.approx(whole.fidelity.kept, abs=1e-6)


def steps_told(seen):
    """Numbers of the steps of training that were told."""
    return [step.done for step in seen if step.unit == "steps"]


def test_other_settings_do_not_go_on_from_a_state_of_before(classifier, tmp_path, monkeypatch):
    shutil.copytree(classifier / "lsr", tmp_path / "mine")
    with pytest.raises(Killed) as killed:
        run(classifier, tmp_path / "mine", on_step=stop_after(states_saved(monkeypatch)))
    assert "the same command goes on from there" in killed.value.__notes__[0]
    seen = []
    run(classifier, tmp_path / "mine", steps=4, on_step=seen.append)
    assert steps_told(seen) == [1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("kind", ["language_model", "classifier"])
def test_passes_are_what_was_asked_of_the_base(kind, tmp_path, monkeypatch, request):
    model, asked = request.getfixturevalue(kind), []
    for function, name in (
        (forward_with_features, "forward"),
        (teacher_batch, "forward_repeatable"),
    ):
        module = sys.modules[function.__module__]
        plain = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, plain=plain: (asked.append(1), plain(*given))[1]
        )
    done = run(model, model / "lsr", out=tmp_path / "out", steps=60, learning_rate=None)
    training = done.variant.training
    of_teacher = training.passes - 2 * training.steps - 4 * len(training.checks)
    assert len(asked) == training.steps + of_teacher
    assert training.passes <= 1.2 * 2 * 60 + 8  # so small a run has eight batches at least


def test_rates_that_were_tried_are_recorded_and_are_among_the_steps(classifier, tmp_path):
    done = run(classifier, classifier / "lsr", out=tmp_path / "out", steps=40, learning_rate=None)
    record = json.loads((tmp_path / "out" / "compression.json").read_text())["distillation"]
    losses = dict(record["rate_trials"])
    assert 3 <= len(losses) <= MAX_TRIALS
    assert record["rate"] == min(losses, key=losses.get)
    assert done.variant.training.steps <= 40
    given = run(classifier, classifier / "lsr", out=tmp_path / "given", steps=4, learning_rate=0.03)
    assert given.variant.training.rate_trials == ()


def test_a_share_that_is_known_is_not_measured_before_the_first_step(classifier):
    settings = EvaluatorSettings(batch=8, max_length=16)
    evaluator = Evaluator(classifier / "base", classifier / "lora", TEXTS, settings)
    records = []
    for share in (None, 0.25):
        data = evaluator.distillation_data(4)
        student = evaluator.base.with_adapter(classifier / "lsr")
        records.append(distill_factors(student, data, steps=4, rate=0.03, share_before=share))
    measured, known = records
    assert known.before == 0.25
    assert known.checks[0] == (0, 0.25)
    assert known.checks[1:] == measured.checks[1:]
    # An evaluation costs as much as its texts fill batches of eight.
    assert measured.passes - known.passes == pytest.approx(data.validation.examples / 8, abs=0.02)


def test_where_no_rate_is_stable_the_record_says_so(classifier, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "train_step", lambda *_: math.nan)
    evaluator = Evaluator(
        classifier / "base", classifier / "lora", TEXTS, EvaluatorSettings(batch=8, max_length=16)
    )
    student = evaluator.base.with_adapter(classifier / "lsr")
    trainer = Trainer(student, evaluator.distillation_data(40), 40, 0, None)
    state = trainer.select_learning_rate(trainer.initial_state())
    assert [loss for _, loss in state.rate_trials] == [None] * 4
    assert state.step == 0
    assert state.rate == min(rate for rate, _ in state.rate_trials)


@pytest.mark.parametrize("has_units", [True, False])
def test_mixed_precision_learns_as_much(language_model, tmp_path, monkeypatch, has_units):
    monkeypatch.setattr(mixed_precision, "has_bfloat16_units", lambda: has_units)
    _, student = open_pair(
        language_model / "base", language_model / "lora", weakened(language_model, tmp_path / "w")
    )
    dtypes = []
    layer = next(m for m in student.model.modules() if isinstance(m, torch.nn.Linear))
    layer.register_forward_hook(lambda _layer, _inputs, output: dtypes.append(output.dtype))
    settings = EvaluatorSettings(batch=8, max_length=16)
    evaluator = Evaluator(language_model / "base", language_model / "lora", TEXTS, settings)
    of_small_models = partial(mixed_precision.mixed_precision, min_parameters=1)
    room = sys.modules[distill_factors.__module__]
    monkeypatch.setattr(room, "mixed_precision", of_small_models)
    data = evaluator.distillation_data(12)
    before = data.validation.compare(student).kept
    lost = (1.0 - before) * data.validation.effect
    dtypes.clear()
    monkeypatch.setattr(room, "MIN_MIXED_LOSS", 0.9 * lost)
    done = distill_factors(student, data, steps=12, rate=0.03, share_before=before)
    assert set(dtypes) == {torch.bfloat16 if has_units else torch.float32}
    assert done.after > done.before + 0.01
    share = data.validation.compare(student).kept  # in float32, as it is reported
    assert share == pytest.approx(done.after, abs=0.01)
    # What is about as small as the roundoff of bfloat16 cannot be learned in it.
    dtypes.clear()
    monkeypatch.setattr(room, "MIN_MIXED_LOSS", 1.1 * lost)
    distill_factors(student, data, steps=2, rate=0.03, share_before=before)
    assert set(dtypes) == {torch.float32}


def test_of_a_classifier_what_its_last_layer_reads_is_learned_too(classifier):
    """Before the first step the loss is the divergence and a share of the feature distance."""
    settings = EvaluatorSettings(batch=8, max_length=16)
    evaluator = Evaluator(classifier / "base", classifier / "lora", TEXTS, settings)
    student, data = evaluator.base.with_adapter(classifier / "lsr"), evaluator.distillation_data(1)
    (micro,) = data.teacher_batches(0)
    plain, weighted = (Trainer(student, data, 1, 0, None) for _ in range(2))
    plain.feature_weight = 0.0
    with torch.no_grad():
        features = forward_with_features(student, micro.batch)[1]
        added = weighted.feature_weight * float((features - micro.features).square().sum())
        assert (
            0.0 < added == pytest.approx(float(weighted.loss(micro) - plain.loss(micro)), rel=1e-4)
        )


def test_training_ends_when_enough_is_kept_and_the_lora_runs_on_each_batch_once(
    classifier, tmp_path
):
    settings = EvaluatorSettings(batch=8, max_length=16)
    evaluator = Evaluator(classifier / "base", classifier / "lora", TEXTS, settings)
    data, lora = evaluator.distillation_data(24), open_checkpoint(classifier / "lora")
    before = evaluator.measure(classifier / "lsr")

    def train(name, **settings):
        settings |= {"steps": 24, "before": before, "rate": 0.03}
        return distill_variant(
            evaluator, classifier / "lsr", lora, tmp_path / name, data, **settings
        ).training

    first, again, short = train("first"), train("again"), train("short", target_share=-1.0)
    assert len(data.computed) > 1
    assert again.steps == first.steps
    assert again.passes == first.passes - (len(data.computed) - 1)
    assert short.steps == 0  # as much is kept before the first step


def test_a_training_that_ended_early_goes_on_where_more_is_enough(
    classifier, tmp_path, monkeypatch
):
    settings = EvaluatorSettings(batch=8, max_length=16)
    evaluator = Evaluator(classifier / "base", classifier / "lora", TEXTS, settings)
    data, shares, steps = evaluator.distillation_data(24), count(1), []
    monkeypatch.setattr(Reference, "compare", lambda *_: SimpleNamespace(kept=next(shares) / 10.0))
    with Journal.beside(tmp_path / "out") as journal:
        for enough in (0.15, math.inf):
            student = evaluator.base.with_adapter(classifier / "lsr")
            about = {
                "data": data,
                "steps": 24,
                "rate": 0.03,
                "journal": journal,
                "key": "training",
            }
            done = distill_factors(
                student, target_share=enough, on_step=lambda step: steps.append(step.done), **about
            )
            assert [share for _, share in done.checks[:2]] == [0.1, 0.2]
            if enough < 1.0:
                assert len(done.checks) == 2
    assert steps == list(range(1, 25))
    assert done.steps == 24


def test_what_a_model_reads_need_not_be_tokens(language_model, tmp_path):
    source, student = open_pair(
        language_model / "base", language_model / "lora", weakened(language_model, tmp_path / "w")
    )
    embed = source.model.get_input_embeddings()
    ids = torch.randint(2, 30, (6, 4, 7), generator=torch.Generator().manual_seed(0))
    batches = [
        {"inputs_embeds": embed(rows).detach(), "attention_mask": torch.ones_like(rows)}
        for rows in ids
    ]
    validation = Reference(source, batches[4:])
    data = DistillationData(source, [[batch] for batch in batches[:4]], validation)
    done = distill_factors(student, data, steps=12, rate=0.03)
    assert done.after > done.before + 0.01


def test_micro_batches_are_the_same_step(classifier, tmp_path):
    one = run(classifier, classifier / "lsr", out=tmp_path / "one", steps=4)
    two = run(
        classifier,
        classifier / "lsr",
        out=tmp_path / "two",
        steps=4,
        settings=READ.replace(micro=3),
    )
    for (_, first), (_, second) in zip(
        one.variant.training.checks, two.variant.training.checks, strict=True
    ):
        assert first == pytest.approx(second, abs=1e-4)


def test_two_processes_share_the_steps_of_one(classifier, tmp_path):
    """Started by `accelerate launch` or torchrun; on processors gloo sums the gradients."""
    alone = run(
        classifier,
        classifier / "lsr",
        out=tmp_path / "alone",
        steps=4,
        settings=READ.replace(micro=4),
    )
    (tmp_path / "texts.txt").write_text("\n".join(text for text, _ in TEXTS) + "\n")
    words = [
        "distill",
        classifier / "lsr",
        "--out",
        tmp_path / "shared",
        "--base",
        classifier / "base",
    ]
    words += ["--teacher", classifier / "lora", "--data", tmp_path / "texts.txt"]
    words += ["--steps", 4, "--learning-rate", 0.03, "--batch", 8, "--micro", 4, "--max-length", 16]
    assert processes.run_together(2, processes.run_command_here, *words) == [0, 0]
    record = json.loads((tmp_path / "shared" / "compression.json").read_text())["distillation"]
    checks = [share for _, share in record["checks"]]
    assert checks == pytest.approx([share for _, share in alone.variant.training.checks], abs=1e-4)
    assert record["after"]["kept"] == pytest.approx(alone.variant.after.kept, abs=1e-4)


def test_the_training_loss_is_the_divergence(classifier):
    torch.manual_seed(0)
    old, new = torch.randn(2, 9, 5)
    assert float(kl_loss(old, new, Head.classification)) == pytest.approx(
        float(divergences(old, new, Head.classification).sum()), rel=1e-5
    )
    old, new = old[:, :1], new[:, :1]
    assert float(kl_loss(old, new, Head.numbers)) == pytest.approx(
        float(divergences(old, new, Head.numbers).sum()), rel=1e-5
    )


def test_factors_of_an_open_model_are_those_of_its_file(language_model):
    evaluator = Evaluator(
        language_model / "base",
        language_model / "lora",
        TEXTS,
        EvaluatorSettings(batch=8, max_length=16),
    )
    student = evaluator.base.with_adapter(language_model / "lsr")
    for module in student.model.modules():
        if isinstance(module, LsrLayer):
            module.scaling["default"] = (
                2.0  # as a trained adapter may have it; what compress writes has one
            )
    found = products_of(student)
    written = open_checkpoint(language_model / "lsr")
    assert set(found) == {layer.name for layer in written.layers}
    for layer in written.layers:
        left, _ = layer.load()
        torch.testing.assert_close(
            torch.from_numpy(found[layer.name].left.to_matrix()),
            2.0
            * sum(
                torch.kron(*(torch.tensor(f[k]).double() for f in left))
                for k in range(len(left[0]))
            ),
        )


def test_factors_that_are_not_finite_are_not_rounded_to_numbers(classifier, tmp_path):
    lora = open_checkpoint(classifier / "lora")
    compress(lora, CompressionPlan(separation_rank=2, storage="int4")).save(tmp_path / "made")
    evaluator = Evaluator(classifier / "base", classifier / "lora", TEXTS, READ)
    student = evaluator.base.with_adapter(tmp_path / "made")
    first, *others = trainable_factors(student.model)
    before = [factor.detach().clone() for factor in others]
    with torch.no_grad():
        first[0, 0, 0] = math.nan
        for factor in others:
            factor *= 1.0 + 0.1 * torch.rand_like(factor)
    FactorRounding(student, tmp_path / "made")()
    assert torch.isnan(first[0, 0, 0])
    moved = [not torch.equal(*pair) for pair in zip(others, before, strict=True)]
    assert sum(moved) > len(moved) / 2


def test_only_lsr_factors_are_trained(classifier):
    evaluator = Evaluator(
        classifier / "base", classifier / "lora", TEXTS, EvaluatorSettings(batch=8, max_length=16)
    )
    student = evaluator.base.with_adapter(classifier / "lsr")
    count = sum(p.numel() for p in trainable_factors(student.model))
    assert count == open_checkpoint(classifier / "lsr").adapter_parameters
    assert sum(p.numel() for p in student.model.parameters() if p.requires_grad) == count
    with pytest.raises(CalibrationError, match="no LSR factors to train"):
        trainable_factors(evaluator.source.model)


def test_texts_that_begin_alike_are_held_out_together():
    texts = [(f"prompt {i // 3}", f"answer {i}") for i in range(300)]
    held, rest = split_texts(texts, 40, seed=1)
    assert 0 < len(held) <= 40
    assert sorted(held + rest) == sorted(texts)
    assert not {text[0] for text in held} & {text[0] for text in rest}
    assert split_texts(texts, 40, seed=1) == (held, rest)


def test_only_completions_of_json_lines_are_answers(language_model, tmp_path):
    rows = [
        {"prompt": text, "completion": f" w{i % 30} w{i % 7}"} for i, (text, _) in enumerate(TEXTS)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    weak = weakened(language_model, tmp_path / "weak")
    done = run(
        language_model, weak, data=file, out=tmp_path / "out", settings=READ.replace(max_length=32)
    )
    assert done.fidelity.answers == 2 * done.fidelity.examples
    assert done.fidelity.unit == "token"
    assert done.variant.after.kept > done.variant.before.kept


def test_all_lengths_are_told_once_before_anything_is_answered(language_model, monkeypatch):
    rows = [PromptExample(text, f" w{i % 7}", f"line {i}") for i, (text, _) in enumerate(TEXTS)]
    rows[70:72] = [
        PromptExample(f"{i} " + "w1 " * n, " w2", f"line {i}") for i, n in ((70, 40), (71, 50))
    ]
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "Reference", None)  # nothing is answered
        with pytest.raises(DataError, match=r"line 71: .*\(2 of 96 examples are.*--truncate"):
            Evaluator(
                language_model / "base",
                language_model / "lora",
                rows,
                EvaluatorSettings(max_length=40),
            )
    evaluator = Evaluator(
        language_model / "base",
        language_model / "lora",
        rows,
        EvaluatorSettings(max_length=40, truncate=True),
    )
    widths = [batch["input_ids"].shape[1] for batch in evaluator.batches(rows)]
    assert max(widths) == 40


def test_a_lora_that_does_nothing_has_nothing_to_keep(classifier, tmp_path):
    shutil.copytree(classifier / "lora", tmp_path / "idle")
    tensors = load_file(tmp_path / "idle" / "adapter_model.safetensors")
    still = {name: value * (0.0 if "lora_B" in name else 1.0) for name, value in tensors.items()}
    save_file(still, tmp_path / "idle" / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(LsrError, match="there is no effect to keep"):
        Evaluator(
            classifier / "base", tmp_path / "idle", TEXTS, EvaluatorSettings(batch=8, max_length=16)
        )


def test_an_adapter_of_another_model_is_refused(classifier, language_model):
    with pytest.raises(CheckpointError, match="is not in"):
        run(classifier, language_model / "lsr")


def test_a_base_that_does_not_fit_is_one_line(classifier, language_model):
    with pytest.raises(CheckpointError, match="does not (open on the base|fit)") as caught:
        run(classifier, classifier / "lsr", base=language_model / "base")
    assert "\n" not in str(caught.value)


def test_a_plain_lora_is_not_distilled(classifier, tmp_path):
    export_lora(open_checkpoint(classifier / "lsr"), tmp_path / "plain")
    with pytest.raises(CalibrationError, match="no LSR factors to train"):
        run(classifier, tmp_path / "plain")


def test_distill_on_the_command_line(classifier, tmp_path):
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(text for text, _ in TEXTS))
    options = {
        "--teacher": classifier / "lora",
        "--base": classifier / "base",
        "--data": lines,
        "--steps": 12,
    }
    options |= {
        "--out": tmp_path / "out",
        "--batch": 8,
        "--max-length": 16,
        "--learning-rate": 0.03,
        "--json": tmp_path / "f.json",
    }
    given = [
        "distill",
        str(weakened(classifier, tmp_path / "weak")),
        *(str(word) for pair in options.items() for word in pair),
    ]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    facts = json.loads((tmp_path / "f.json").read_text())
    assert facts["promise"]["sentence"] in done.stdout.replace("\n", " ")
    assert facts["promise"]["data"] == "lines.txt"
    assert 0.0 < facts["distillation"]["before"]["kept"] < facts["distillation"]["after"]["kept"]
    # The output is there already.
    assert isinstance(CliRunner().invoke(app, given).exception, CheckpointError)
