"""Features: the last layer makes the logits of them, for every type of classifier."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from tiny_bases import TEXTS, open_pair, write_directories  # noqa: E402

from lsrdecomp.lora.base.base_model import Base  # noqa: E402
from lsrdecomp.lora.base.batches import text_batches  # noqa: E402
from lsrdecomp.lora.base.divergence import without_delta  # noqa: E402
from lsrdecomp.lora.base.heads import Head  # noqa: E402
from lsrdecomp.lora.measure.features import forward_with_features  # noqa: E402
from lsrdecomp.lora.measure.teacher import feature_distance, teacher_batch  # noqa: E402

SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 32,
}
IDS, MASK = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]]), torch.tensor([[1] * 4, [1, 1, 0, 0]])
QUESTION = {"input_ids": IDS, "attention_mask": MASK}


def opened(model):
    torch.manual_seed(0)
    return Base("", model.eval(), None, Head.classification, ())


@pytest.mark.parametrize(
    ("name", "last"),
    [("Bert", "classifier"), ("Roberta", "classifier.out_proj"), ("DistilBert", "classifier")],
)
def test_features_are_what_the_logits_are_made_of(name, last):
    config = getattr(transformers, f"{name}Config")(
        **SMALL, num_labels=3, dim=24, n_heads=2, n_layers=2, hidden_dim=32
    )
    base = opened(getattr(transformers, f"{name}ForSequenceClassification")(config))
    output, features = forward_with_features(base, QUESTION)
    layer = base.model.get_submodule(last)
    assert features.shape == (2, layer.in_features)
    torch.testing.assert_close(layer(features), output.logits)


def test_of_a_decoder_the_token_that_answers_is_taken():
    config = transformers.LlamaConfig(**SMALL, num_labels=3, pad_token_id=0)
    base = opened(transformers.LlamaForSequenceClassification(config))
    output, features = forward_with_features(base, QUESTION)
    assert features.shape == (2, 24)
    torch.testing.assert_close(base.model.score(features), output.logits)


def test_a_model_whose_last_layer_is_not_known_has_no_features():
    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.score = torch.nn.Linear(4, 3)
            self.config = transformers.PretrainedConfig(num_labels=3)

        def forward(self, input_ids, attention_mask):
            logits = 2.0 * self.score(attention_mask.float())
            return transformers.modeling_outputs.SequenceClassifierOutput(logits=logits)

    assert forward_with_features(opened(Bare()), QUESTION)[1] is None


@pytest.mark.parametrize("kind", ["SEQ_CLS", "CAUSAL_LM"])
def test_a_teacher_batch_has_the_logits_and_features_of_the_teacher(kind, tmp_path):
    folder = write_directories(tmp_path, kind)
    source, written = open_pair(folder / "base", folder / "lora", folder / "lsr")
    (batch,) = text_batches(source, TEXTS, size=len(TEXTS), max_length=16, seed=0)
    known = teacher_batch(source, batch)
    output, features = forward_with_features(source, batch)
    torch.testing.assert_close(known.form_logits(), output.logits, rtol=0, atol=0)
    assert known.n_predictions == len(output.logits)
    assert not known.form_logits().requires_grad
    if kind == "CAUSAL_LM":
        assert (known.features, features, feature_distance(source, [known])) == (None, None, None)
        return
    torch.testing.assert_close(known.features, features, rtol=0, atol=0)
    with without_delta(source.model):
        bare = forward_with_features(source, batch)[1]
    assert feature_distance(source, [known]) == pytest.approx(
        float((bare - features).square().sum(1).mean()), rel=1e-5
    )
    for name, parameter in written.model.named_parameters():
        parameter.requires_grad_(".lsr_A." in name)
    (forward_with_features(written, batch)[1] - known.features).square().sum().backward()
    factors = [
        parameter.grad for name, parameter in written.model.named_parameters() if ".lsr_A." in name
    ]
    assert factors
    assert all(float(gradient.abs().sum()) > 0.0 for gradient in factors)
