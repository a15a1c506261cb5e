"""What this room writes, the adapters open: every layer with the same update."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import PREFIX, lora_pair, write_lora_directory

from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.lora.files import open_checkpoint, write_lsr

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

SHAPES = {
    "layers.1.q": (ProductShape((4, 2), (2, 2), (3, 2)), 2, 2),
    "layers.2.q": (ProductShape((4, 2), (2, 2), (3, 2)), 2, 2),
    "layers.11.q": (ProductShape((2, 4), (2, 2), (3, 2)), 2, 3),
    "layers.3.v": (ProductShape((5, 1), (3, 1), (6, 1)), 1, 1),
    "layers.1.v": (ProductShape((5, 1, 1), (1, 2, 2), (3, 2, 1)), 2, 1),
}


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = torch.nn.Linear(6, 8), torch.nn.Linear(6, 5)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(12))
        self.score = torch.nn.Linear(5, 2)


@pytest.mark.filterwarnings("error")
def test_peft_opens_what_is_written_with_the_same_updates(tmp_path: Path) -> None:
    import lsrdecomp.lora.peft  # noqa: F401

    rng = np.random.default_rng(5)
    score = {
        f"{PREFIX}score.{name}": array
        for name, array in (("weight", np.ones((2, 5))), ("bias", np.ones(2)))
    }
    tensors = {
        k: v
        for name, (shape, _, _) in SHAPES.items()
        for k, v in lora_pair(name, *shape.matrix_shape).items()
    }
    tensors |= {name: array.astype(np.float32) for name, array in score.items()}
    source = open_checkpoint(
        write_lora_directory(
            tmp_path / "a",
            tensors,
            modules_to_save=["score"],
            target_modules=list(SHAPES),
            base_model_name_or_path=None,
        )
    )
    layers = []
    for name, (shape, s, t) in SHAPES.items():
        left = tuple(rng.standard_normal((s, *sizes)) for sizes in shape.left.factors)
        right = tuple(rng.standard_normal((t, *sizes)) for sizes in shape.right.factors)
        layers.append((name, left, right))
    write_lsr(tmp_path / "b", source=source, layers=layers)
    base = Model()
    opened = peft.PeftModel.from_pretrained(base, tmp_path / "b")
    assert torch.equal(opened.base_model.model.score.bias, torch.ones(2))
    adapted = {name for name, module in base.named_modules() if hasattr(module, "lsr_A")}
    assert adapted == set(SHAPES)
    for layer in open_checkpoint(tmp_path / "b").layers:
        left, right = layer.load()
        expected = layer.scale * kron_sum(left) @ kron_sum(right)
        delta = base.get_submodule(layer.name).delta_matrix("default").detach().numpy()
        np.testing.assert_allclose(delta, expected, rtol=1e-5, atol=1e-6)
    opened.save_pretrained(tmp_path / "c")
    again = open_checkpoint(tmp_path / "c")
    assert [layer.shape for layer in again.layers] == [
        layer.shape for layer in open_checkpoint(tmp_path / "b").layers
    ]
    assert sorted(again.extras) == sorted(score)


def kron_sum(arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    """Σ_k ⊗_i arrays[i][k], by numpy.kron."""
    total = np.zeros((1, 1))
    for k in range(arrays[0].shape[0]):
        term = np.ones((1, 1))
        for array in arrays:
            term = np.kron(term, array[k])
        total = total + term
    return total
