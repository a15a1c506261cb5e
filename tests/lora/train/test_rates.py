"""Learning rates: a default that follows method and size, and trials that leave no trace."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("trl")
pytest.importorskip("sklearn")

from console import run_command  # noqa: E402

from benchmarks.lab.embedded import EmbeddedRecipe, embedded  # noqa: E402
from lsrdecomp.lora.train.finetune_record import read_record  # noqa: E402
from lsrdecomp.lora.train.finetune_run import finetune  # noqa: E402
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings, SettingsError  # noqa: E402
from lsrdecomp.lora.train.methods import METHODS, REFERENCE_WIDTH, find_method  # noqa: E402
from lsrdecomp.lora.train.rate_trials import RateTrial, best_trial  # noqa: E402
from lsrdecomp.lora.train.rates import choose_rate, default_rate  # noqa: E402
from lsrdecomp.lora.train.trainable_model import open_model  # noqa: E402


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    """Settings of a short run without a learning rate."""
    place = embedded(tmp_path_factory.mktemp("embedded") / "base", recipe=EmbeddedRecipe(steps=20))
    return FinetuneSettings(
        str(place.model),
        str(place.data / "train.tsv"),
        "classes",
        str(place.data / "dev.tsv"),
        method="lsr",
        steps=6,
        device="cpu",
        log_every=1,
        train_examples=96,
        dev_examples=40,
    )


def opened(settings):
    return open_model(settings, settings.base, 10)[0]


def rate_of(settings, **options):
    settings = settings.replace(options=options)
    return default_rate(settings.method, opened(settings))


def test_the_default_falls_with_the_products_that_a_layer_sums(common):
    rule = find_method("lsr").rate
    for inner, terms in (([1, 1], 1), ([2, 2], 4), ([4, 4], 16)):
        rate = rate_of(common, inner_shape=inner, separation_rank=terms)
        of_sizes = rule.rate(math.prod(inner), terms, 64)
        assert rate == pytest.approx(of_sizes, rel=0.05)  # two digits
    few = rate_of(common, inner_shape=[2, 2], separation_rank=1)
    many = rate_of(common, inner_shape=[2, 2], separation_rank=16)
    assert few > many


def test_a_layer_of_its_own_size_counts_by_the_geometric_mean(common):
    rule = find_method("lsr").rate
    pattern = {"layer.0.*": 1, "layer.1.*": 16}
    rate = rate_of(common, inner_shape=[2, 2], separation_rank_pattern=pattern)
    assert rate == pytest.approx(rule.rate(4, 4, 64), rel=0.05)


def test_the_default_of_a_lora_follows_its_rank(common):
    rule = find_method("lora").rate
    lora = common.replace(method="lora")
    for r in (1, 8):
        assert rate_of(lora, r=r) == pytest.approx(rule.rate(r, 1, 64), rel=0.05)


def test_an_embedding_is_as_wide_as_the_reference(common):
    settings = common.replace(method="lora", target_modules=("word_embeddings",))
    assert rate_of(settings, r=4) == pytest.approx(
        find_method("lora").rate.rate(4, 1, None), rel=0.05
    )


@pytest.mark.parametrize(("method", "power"), [("lora", 1 / 2), ("lsr", 1 / 4)])
def test_a_wider_layer_learns_more_slowly(method, power):
    rule = find_method(method).rate
    narrow = rule.rate(8, 1, 256)
    wide = rule.rate(8, 1, 4096)
    assert narrow / wide == pytest.approx(16**power)
    assert rule.rate(8, 1, None) == rule.rate(8, 1, REFERENCE_WIDTH)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_has_a_rate(method):
    rule = find_method(method).rate
    assert 0 < rule.rate(64, 16, None) <= rule.rate(1, 1, None) < 1


def test_a_run_without_a_rate_is_one_with_the_default(common, tmp_path):
    rate = default_rate(common.method, opened(common))
    runs = [
        finetune(settings, tmp_path / name)
        for name, settings in (("absent", common), ("given", common.replace(learning_rate=rate)))
    ]
    assert [run.settings.learning_rate for run in runs] == [rate, rate]
    assert runs[0].losses == runs[1].losses
    assert runs[0].rate_trials == ()


def test_an_adapter_that_is_trained_on_takes_half(common, tmp_path):
    first = finetune(common.replace(steps=2), tmp_path / "first")
    more = finetune(common.replace(init=str(tmp_path / "first" / "adapter")), tmp_path / "more")
    assert more.start == first.dev  # measured unasked
    assert more.settings.learning_rate == pytest.approx(first.settings.learning_rate / 2, rel=0.05)


def test_auto_tries_three_and_then_trains_as_if_its_choice_had_been_given(common, tmp_path):
    stages = []
    record = finetune(
        common.replace(learning_rate="auto"),
        tmp_path / "auto",
        on_step=lambda update: stages.append((update.stage, update.total)),
    )
    tried = [rate for rate, _ in record.rate_trials]
    default = default_rate(common.method, opened(common))
    assert tried == pytest.approx([default / 3, default, 3 * default], rel=0.05)
    chosen = record.settings.learning_rate
    assert chosen in tried
    assert len(stages) == 3 * 8 + 6
    assert stages[0] == (f"trying a rate of {tried[0]:g}", 8)
    assert read_record(tmp_path / "auto") == record
    assert sorted(path.name for path in (tmp_path / "auto").iterdir()) == [
        "adapter",
        "layers.jsonl",
        "record.json",
    ]
    given = finetune(common.replace(learning_rate=chosen), tmp_path / "given")
    assert record.losses == given.losses
    assert record.dev == given.dev


def test_a_run_that_goes_on_does_not_try_again(common, tmp_path):
    settings = common.replace(learning_rate="auto", save_every=2)
    seen = []

    def stop(update):
        seen.append(update.stage)
        if update.stage == "training" and update.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(settings, tmp_path / "out", on_step=stop)
    assert len(seen) == 3 * 8 + 3
    seen.clear()
    record = finetune(settings, tmp_path / "out", on_step=lambda update: seen.append(update.stage))
    assert seen == ["training"] * 4  # from step 2 of 6
    assert len(record.rate_trials) == 3


def test_where_every_trial_diverges_the_default_is_taken(common, tmp_path):
    model = opened(common)
    before = {name: value.clone() for name, value in model.named_parameters()}

    def diverge(rate, steps):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.fill_(math.nan)
        return [1.0] * (steps - 1) + [math.nan]

    settings = common.replace(learning_rate="auto")
    choice = choose_rate(settings, model, 60, diverge, tmp_path / "rate.json")
    assert choice.rate == default_rate(common.method, model)
    assert [loss for _, loss in choice.trials] == [None] * 3
    assert all(value.equal(before[name]) for name, value in model.named_parameters())


def choose(common, folder, losses_of):
    """The choice among a third of the default, it and its triple, by the losses of each."""
    model = opened(common)
    default = default_rate(common.method, model)

    def trial(rate, steps):
        return losses_of(rate / default)[:steps]

    choice = choose_rate(
        common.replace(learning_rate="auto"), model, 60, trial, folder / "rate.json"
    )
    return choice.rate / default


NOISE = [0.3, -0.2, 0.1, -0.3, 0.2, -0.1, 0.25, -0.25]
"""How hard the batches of a trial are; that moves all trials alike."""


def test_auto_takes_another_rate_where_it_is_ahead_on_the_same_batches(common, tmp_path):
    def losses_of(multiple):
        lead = 0.02 if multiple > 2 else 0.0  # far below the noise of the batches
        return [2.0 + noise - lead * (1 + noise) for noise in NOISE]

    assert choose(common, tmp_path, losses_of) == pytest.approx(3, rel=0.05)


def test_auto_keeps_the_default_where_another_rate_is_ahead_by_chance(common, tmp_path):
    def losses_of(multiple):
        if multiple > 2:
            return [2.0] * 4 + [2.0, 2.0, 2.0, 1.9]  # on one batch of four
        return [2.0] * 8

    assert choose(common, tmp_path, losses_of) == 1


def test_auto_leaves_a_default_that_diverges(common, tmp_path):
    def losses_of(multiple):
        return [2.0] * 8 if multiple < 0.5 else [2.0] * 7 + [math.nan]

    assert choose(common, tmp_path, losses_of) == pytest.approx(1 / 3, rel=0.05)


def test_trials_are_compared_by_their_later_steps():
    by_rate = {0.1: [0.0, 0.0, 5.0, 5.0], 0.3: [9.0, 9.0, 4.0, 4.0], 1.0: [1.0, 1.0, 4.0, math.inf]}
    trials = [RateTrial(rate, losses, None) for rate, losses in by_rate.items()]
    assert best_trial(trials).rate == 0.3
    assert best_trial([]) is None


def test_a_rate_is_a_number_or_auto(common):
    with pytest.raises(SettingsError, match="learning_rate must be a number above 0, or auto"):
        common.replace(learning_rate="fast")


def test_the_command_line_reads_both(tmp_path):
    for text in ("auto", "0.01"):
        done = run_command(
            *("finetune", "--base", "base", "--data", "none", "--task", "nothing"),
            *("--learning-rate", text),
            *("--out", tmp_path / "out"),
        )
        assert "task must be one of" in done.stderr
    done = run_command(
        *("finetune", "--base", "base", "--data", "none", "--learning-rate", "fast"),
        *("--out", tmp_path / "out"),
    )
    assert "--learning-rate must be a number above 0, or auto, got 'fast'" in done.stderr
    assert not (tmp_path / "out").exists()
