"""Calibration in bounded memory: recomputed blocks and groups of layers change no statistics."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

from oracles import matrix_of  # noqa: E402
from tiny_language_model import tiny_model  # noqa: E402

from lsrdecomp.errors import CalibrationError  # noqa: E402
from lsrdecomp.lora.base.accumulators import sums_memory  # noqa: E402
from lsrdecomp.lora.base.base_model import Base  # noqa: E402
from lsrdecomp.lora.base.calibrate import calibrate  # noqa: E402
from lsrdecomp.lora.base.covariance import CovarianceSettings  # noqa: E402
from lsrdecomp.lora.base.heads import Head  # noqa: E402
from lsrdecomp.lora.base.measured_model import recompute_activations  # noqa: E402
from lsrdecomp.lora.base.sampled_gradients import watched  # noqa: E402
from lsrdecomp.lora.files.progress import ProgressUpdate  # noqa: E402
from lsrdecomp.lora.files.statistics import read_statistics  # noqa: E402

LLAMA = [
    f"model.layers.{i}.{part}"
    for i in (0, 1)
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
]


def batches(count, *, size=4, length=9, vocabulary=12, **more):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield {
            "input_ids": torch.randint(3, vocabulary, (size, length), generator=generator)
        } | more


def classifier():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 40,
    }
    config = transformers.BertConfig(**sizes, vocab_size=50, num_labels=3, initializer_range=0.3)
    # Dropout stays off all the same.
    return transformers.BertForSequenceClassification(config).train()


def translator():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, vocab_size=50, decoder_start_token_id=0)
    )


BERT = [
    "bert.encoder.layer.0.attention.self.query",
    "bert.encoder.layer.1.output.dense",
    "classifier",
]
T5 = ["encoder.block.0.layer.0.SelfAttention.q", "encoder.block.1.layer.1.DenseReluDense.wo"]
T5 += ["decoder.block.0.layer.1.EncDecAttention.k", "decoder.block.1.layer.0.SelfAttention.v"]
LABELS = {"labels": torch.tensor([[5, 6, 7, 1]] * 4)}
KINDS = {
    "causal": (tiny_model, LLAMA, Head.causal_lm, {}),
    "a late layer alone": (tiny_model, ["model.layers.1.mlp.down_proj"], Head.causal_lm, {}),
    "an early layer alone": (tiny_model, ["model.layers.0.mlp.down_proj"], Head.causal_lm, {}),
    "classification": (classifier, BERT, Head.classification, {}),
    "encoder and decoder": (translator, T5, Head.seq2seq, LABELS),
}


def assert_same(first, second):
    one, other = read_statistics(first), read_statistics(second)
    assert list(one) == list(other)
    for name in one:
        for side in ("input", "output"):
            a, b = (getattr(each.measured(name), side) for each in (one, other))
            np.testing.assert_allclose(
                matrix_of(a), matrix_of(b), atol=2e-3 * float(np.abs(a.values).max())
            )
    tables = [json.loads((place / "statistics.json").read_text()) for place in (first, second)]
    for table in tables:
        table.pop("sha256")  # of the last bits
        for layer in table["layers"].values():
            layer["fisher_trace"] = pytest.approx(layer["fisher_trace"], rel=1e-4)
    assert tables[0] == tables[1]


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_computed_again_give_the_same_statistics(kind, tmp_path):
    make, names, head, more = KINDS[kind]
    base = Base("", make(), None, head, tuple(names))
    common = {"seed": 0, "samples": 12}
    calibrate(base, batches(3, **more), out=tmp_path / "kept", checkpointing=False, **common)
    calibrate(base, batches(3, **more), out=tmp_path / "again", checkpointing=True, **common)
    assert_same(tmp_path / "kept", tmp_path / "again")


def saved_bytes(model, names, again):
    """Count the bytes that a forward pass keeps for the way back, watched layers among them."""
    modules = {name: model.get_submodule(name) for name in names}
    found = {}

    def keep(tensor):
        found[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    weights = {parameter.data_ptr() for parameter in model.parameters()}
    model.requires_grad_(False).eval()
    with (
        recompute_activations(model, list(modules.values()) if again else []) as blocks,
        watched(modules, lambda *_: None) as record,
    ):
        assert blocks == 2
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(**next(batches(1)), use_cache=False)
        calls = sum(
            call.inputs.numel() * call.inputs.element_size()
            for each in record.calls.values()
            for call in each
        )
    return calls + sum(size for place, size in found.items() if place not in weights)


def test_activations_inside_blocks_are_not_kept():
    assert saved_bytes(tiny_model(), LLAMA, True) < 0.25 * saved_bytes(tiny_model(), LLAMA, False)


def test_the_model_has_its_own_blocks_back(tmp_path):
    model = classifier()
    before = [dict(module.__dict__) for module in model.modules()]
    calibrate(
        Base("", model, None, Head.classification, tuple(BERT)),
        batches(1),
        out=tmp_path,
        seed=0,
        samples=4,
    )
    assert [module.__dict__.keys() for module in model.modules()] == [
        each.keys() for each in before
    ]


def test_a_pass_that_is_not_to_be_recorded_leaves_nothing_behind():
    layer = torch.nn.Linear(3, 2)
    with watched({"layer": layer}, lambda *_: None) as record:
        with torch.no_grad():
            layer(torch.randn(4, 3))
        record.clear()
        assert (record.calls, record.n_calls) == ({"layer": []}, {"layer": 0})
        layer(torch.randn(4, 3))
        assert (len(record.calls["layer"]), record.n_calls["layer"]) == (1, 1)


class StopHereError(Exception):
    pass


def test_groups_of_layers_give_the_statistics_of_one_pass(tmp_path):
    model, common = tiny_model(), {"seed": 0, "samples": 12, "save_every": 1}
    base = Base("", model, None, Head.causal_lm, tuple(LLAMA))
    covariance = CovarianceSettings(max_full=1024, rank=128, seed=0)
    sums = {
        name: sums_memory(tuple(model.get_submodule(name).weight.shape), covariance)
        for name in LLAMA
    }
    assert [sums[LLAMA[0]], sums[LLAMA[2]]] == [4 * 2 * 32**2, 4 * (32**2 + 64**2)]
    limit = sum(sums.values()) // 2
    calibrate(base, batches(3), out=tmp_path / "one", **common)
    seen = []
    passes = model.register_forward_hook(lambda *_: seen.append(1))
    calibrate(base, batches(3), out=tmp_path / "two", max_memory=limit, **common)
    passes.remove()
    assert len(seen) == 6
    assert_same(tmp_path / "one", tmp_path / "two")

    def stop(step):  # in the second group
        if step.done == 12 + 8:
            raise StopHereError

    with pytest.raises(StopHereError):
        calibrate(
            base, batches(3), out=tmp_path / "three", max_memory=limit, on_step=stop, **common
        )
    # The journal holds the first group, and sums of the second.
    assert len(list((tmp_path / ".three.journal").glob("*.safetensors"))) == 2
    steps = []
    calibrate(
        base, batches(3), out=tmp_path / "three", max_memory=limit, on_step=steps.append, **common
    )
    # Only the batch that was not saved is left.
    assert steps == [ProgressUpdate("calibrating", 24, 24, "examples")]
    for name in ("statistics.json", "statistics.safetensors"):
        assert (tmp_path / "three" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert len(list((tmp_path / "three").iterdir())) == 2
    with pytest.raises(
        CalibrationError, match=r"its sums take 8,192 bytes, more than the 8,000 of max_memory"
    ):
        calibrate(base, batches(3), out=tmp_path / "four", max_memory=8000, **common)
    assert not (tmp_path / "four").exists()
