"""Calibration: the statistics are second moments, their norm predicts a KL divergence, and a run can be interrupted."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from lsrdecomp.compression.statistics import read_statistics  # noqa: E402
from lsrdecomp.errors import CheckpointError, ShapeError  # noqa: E402
from lsrdecomp.training.calibrate import CalibrationError, calibrate  # noqa: E402
from lsrdecomp.training.covariance import Covariance  # noqa: E402
from lsrdecomp.training.fisher import Head, sampled_log_likelihood  # noqa: E402

SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40, "vocab_size": 50}
QUERY, VALUE = (f"bert.encoder.layer.0.attention.self.{name}" for name in ("query", "value"))
DENSE = "bert.encoder.layer.1.output.dense"


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL, num_labels=3, initializer_range=0.3)
    return transformers.BertForSequenceClassification(config).eval()


def texts(count, *, size=8, shortest=5, longest=12, seed=0):
    """Random token batches with padding on the right."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        lengths = torch.randint(shortest, longest + 1, (size, 1), generator=generator)
        mask = (torch.arange(longest) < lengths).long()
        yield {"input_ids": torch.randint(1, 50, (size, longest), generator=generator) * mask, "attention_mask": mask}


def measured_kl(model, name, difference, batches):
    """Mean KL divergence per example between the model's answers before and after ``difference`` is added."""
    weight = dict(model.named_parameters())[f"{name}.weight"]
    total, examples = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            before = model(**batch).logits.double().log_softmax(-1)
            weight += difference
            after = model(**batch).logits.double().log_softmax(-1)
            weight -= difference
            total += float((before.exp() * (before - after)).sum())
            examples += len(before)
    return total / examples


def predicted_kl(statistics, difference):
    """½ ‖G^½ D C^½‖_F², from formed matrices."""
    C, G = statistics.input.to_matrix(), statistics.output.to_matrix()
    return 0.5 * float(np.trace(G @ difference @ C @ difference.T))


@pytest.mark.parametrize("name", [QUERY, VALUE, DENSE])
def test_half_the_squared_norm_predicts_the_kl_of_a_small_change(classifier, tmp_path, name):
    calibrate(classifier, texts(120), modules=[name], out=tmp_path, seed=0, samples=960)
    statistics = read_statistics(tmp_path)[name]
    ratios = []
    for seed in range(6):
        difference = np.random.default_rng(seed).standard_normal(statistics.shape).astype(np.float32) * 3e-3
        measured = measured_kl(classifier, name, torch.from_numpy(difference), texts(25, seed=1))
        ratios.append(predicted_kl(statistics, difference.astype(float)) / measured)
    # The trace is matched, so the mean over random changes is right up to sampling; a single one is not.
    print(name, ratios, np.mean(ratios))
    assert 0.7 < np.mean(ratios) < 1.4
    assert min(ratios) > 0.3
    assert max(ratios) < 3
