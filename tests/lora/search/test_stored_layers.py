"""Every structure a layer can be stored in counts its own numbers, wherever it is looked at.

The recipe "Adding a structure" of CONTRIBUTING.md is run here as it stands there.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoint_files import PREFIX, write_lora_directory
from console import run_command

from lsrdecomp import LowRank, compress
from lsrdecomp.errors import CheckpointError, UnsupportedError
from lsrdecomp.formats.quantized import QuantizedProduct
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.lora.compress import export_lora
from lsrdecomp.lora.files import encodings, open_checkpoint, write_lsr
from lsrdecomp.lora.files.encodings import bytes_of, entry_of
from lsrdecomp.lora.files.packed_index import decode_index, encode_index, stored_layers
from lsrdecomp.lora.measure import verify
from lsrdecomp.lora.search import CompressionPlan, Search, candidates
from lsrdecomp.lora.search.layers import Layer
from lsrdecomp.lora.search.quantize import quantize, quantized_product, stored_like, stored_product
from lsrdecomp.lora.search.spectral_codes import pair_code, svd_code
from lsrdecomp.solvers.pair.factorwise import FactorwiseSVD

if TYPE_CHECKING:
    from collections.abc import Callable

    from lsrdecomp.formats import Stored

SIZE = 24
QUERY = "bert.encoder.layer.0.attention.self.query"
VALUE = "bert.encoder.layer.1.attention.self.value"
QUICK = Search(orders=(2,), rounds=0, sweeps=4)
CONTRIBUTING = Path(__file__).parents[3] / "CONTRIBUTING.md"


def layer_of(rng: np.random.Generator, rank: int = 6) -> Layer:
    left, right = rng.standard_normal((SIZE, rank)), rng.standard_normal((rank, SIZE))
    return Layer.of(QUERY, LowRank(left, right))


def product_of(rng: np.random.Generator, terms: tuple[int, int] = (3, 2)) -> Any:
    shape = ProductShape((6, 4), (3, 2), (4, 6))
    return FactorwiseSVD().truncations(layer_of(rng).pair, shape).truncate(*terms)


def long_scales(product: Any) -> Any:
    """Return codes with float16 scales, as those of many bits have."""
    return QuantizedProduct(quantize(product.left, 4), quantize(product.right, 4))


STRUCTURES: dict[str, Callable[[np.random.Generator], Stored]] = {
    "product in float32": lambda rng: stored_product(product_of(rng), "float32"),
    "product in bfloat16": lambda rng: stored_product(product_of(rng), "bfloat16"),
    "product in float16": lambda rng: stored_product(product_of(rng), "float16"),
    "product of no terms": lambda rng: stored_product(product_of(rng, (0, 0)), "float16"),
    "product in int8": lambda rng: quantized_product(product_of(rng), 8),
    "product in int4": lambda rng: quantized_product(product_of(rng), 4),
    "product in int4 with scales of two bytes": lambda rng: long_scales(product_of(rng)),
    "product in int4 of no terms": lambda rng: quantized_product(product_of(rng, (0, 0)), 4),
    "components": lambda rng: svd_code(layer_of(rng), (6, 4, 0, 2, 0, 0)),
    "components in groups": lambda rng: svd_code(layer_of(rng), (4, 3), (16, 2**20)),
    "no components": lambda rng: svd_code(layer_of(rng), (0,) * 6),
    "columns of the pair": lambda rng: pair_code(layer_of(rng)),
}
"""One value of each structure, in each way that it can look; of a layer of 24 × 24."""


@pytest.fixture
def source(tmp_path: Path) -> Any:
    """A LoRA of two layers of 24 × 24."""
    rng = np.random.default_rng(3)
    tensors = {}
    for name in (QUERY, VALUE):
        tensors[f"{PREFIX}{name}.lora_A.weight"] = rng.standard_normal((6, SIZE))
        tensors[f"{PREFIX}{name}.lora_B.weight"] = rng.standard_normal((SIZE, 6))
    config = {"r": 6, "lora_alpha": 6, "target_modules": ["query", "value"]}
    return open_checkpoint(write_lora_directory(tmp_path / "lora", tensors, **config))


def assert_same_product(one: Stored, other: Stored) -> None:
    expected = np.asarray(other.dequantized().to_matrix())
    found = np.asarray(one.dequantized().to_matrix())
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14 * np.abs(expected).max())


def check_index_and_bytes_say_what_is_stored(stored: Stored) -> None:
    numbers = np.concatenate([np.zeros(0, np.uint8), *bytes_of(stored)])
    (packed,) = decode_index(encode_index({"q": entry_of(stored)})).layers(numbers).values()
    entry = packed.entry
    assert (entry.parameters, entry.label) == (stored.parameters, stored.label)
    assert (entry.shape, entry.terms, entry.storage) == (
        stored.shape,
        stored.terms,
        stored.storage,
    )
    in_the_index = stored.bytes - numbers.size  # widths, groups and exponents of codes
    assert entry.size == numbers.size
    assert 0 <= in_the_index <= 13
    again = packed.stored()
    assert type(again) is type(stored)
    assert_same_product(again, stored)
    shapes = tuple([factor.shape for factor in side] for side in packed.factors())
    assert shapes == packed.factor_shapes


def check_a_directory_counts_it(stored: Stored, source: Any, out: Path) -> None:
    written = open_checkpoint(write_lsr(out, source=source, layers=[(QUERY, stored)]))
    (layer,) = written.layers
    assert (layer.parameters, layer.label, layer.dtype) == (
        stored.parameters,
        stored.label,
        stored.storage,
    )
    assert written.adapter_parameters == stored.parameters
    assert stored_layers(written)[QUERY].bytes == stored.bytes
    assert stored.label in run_command("inspect", out, "--wide").stdout
    exported = open_checkpoint(export_lora(written, out.with_name("exported"), storage="float64"))
    left, right = exported.layers[0].load()
    expected = np.asarray(stored.dequantized().to_matrix())
    np.testing.assert_allclose(left @ right, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def check_peft_opens_it(stored: Stored, source: Any, out: Path) -> None:
    pytest.importorskip("peft")
    from adapters_support import tiny_bert
    from peft import PeftModel

    import lsrdecomp.lora.peft  # noqa: F401 - teaches PEFT the type

    path = write_lsr(out, source=source, layers=[(QUERY, stored)])
    model = PeftModel.from_pretrained(tiny_bert(), path)
    delta = model.base_model.model.get_submodule(QUERY).get_delta_weight("default").numpy()
    expected = np.asarray(stored.dequantized().to_matrix())
    np.testing.assert_allclose(delta, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def check_other_numbers_are_stored_alike(stored: Stored) -> None:
    product = product_of(np.random.default_rng(9))
    again = stored_like(stored, product)
    assert (type(again), again.structure) == (type(stored), stored.structure)
    assert again.shape.matrix_shape == stored.shape.matrix_shape


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_keeps_the_contract(name: str, source: Any, tmp_path: Path) -> None:
    stored = STRUCTURES[name](np.random.default_rng(0))
    check_index_and_bytes_say_what_is_stored(stored)
    check_a_directory_counts_it(stored, source, tmp_path / "out")
    check_peft_opens_it(stored, source, tmp_path / "peft")
    check_other_numbers_are_stored_alike(stored)


def test_every_encoding_has_a_structure_here() -> None:
    rng = np.random.default_rng(0)
    kinds = {entry_of(make(rng))[0] for make in STRUCTURES.values()}
    assert kinds == {encoding.kind for encoding in encodings.ENCODINGS.values()}


def test_a_structure_without_a_row_is_refused_by_name(source: Any, tmp_path: Path) -> None:
    class Unknown:
        shape = ProductShape.low_rank((SIZE, SIZE), 1)
        structure = "unknown"

    with pytest.raises(UnsupportedError, match="Unknown has no row in ENCODINGS"):
        write_lsr(tmp_path / "out", source=source, layers=[(QUERY, Unknown())])  # type: ignore[list-item]
    with pytest.raises(UnsupportedError, match="layers of unknown cannot be stored"):
        stored_like(Unknown(), product_of(np.random.default_rng(0)))  # type: ignore[arg-type]


def test_a_candidate_says_what_it_is_or_cannot_be_made() -> None:
    class Silent(candidates.Candidate):
        structure = "silent"

    with pytest.raises(TypeError, match="abstract method"):
        Silent(parameters=1, squared_error=0.0)  # type: ignore[abstract]


# -- the recipe ------------------------------------------------------------------------------------


def recipe() -> tuple[list[str], str]:
    """The code of "Adding a structure", file by file, and the row of the test."""
    section = CONTRIBUTING.read_text(encoding="utf-8").split("## Adding a structure")[1]
    section = section.split("\n## ")[0]
    (row,) = re.findall(r'`"diagonal": (lambda rng: .*?)`', section)
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL), row


def extended(module: ModuleType, code: str) -> dict[str, Any]:
    """The names of a module with code added to its end."""
    names = dict(vars(module))
    exec(compile(code, str(CONTRIBUTING), "exec"), names)
    return names


@pytest.fixture
def contributed(monkeypatch: pytest.MonkeyPatch) -> Callable[[np.random.Generator], Stored]:
    """Put the structure of CONTRIBUTING.md in its place; return what its row makes."""
    (new_file, encoding, candidate), row = recipe()
    module = ModuleType("lsrdecomp.formats.diagonal")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(new_file, "diagonal.py", "exec"), module.__dict__)
    added = extended(encodings, encoding)
    table = {**encodings.ENCODINGS, 6: added["DiagonalEncoding"]()}
    monkeypatch.setattr(encodings, "ENCODINGS", table)
    added = extended(candidates, candidate)
    families = (*candidates.FAMILIES, added["diagonal_candidates"])
    monkeypatch.setattr(candidates, "FAMILIES", families)
    return eval(row, vars(module))  # type: ignore[no-any-return]


def nearly_diagonal(folder: Path) -> Any:
    """A LoRA of one layer that is nearly diagonal, and of one that is not."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name in (QUERY, VALUE):
        left = rng.standard_normal((SIZE, SIZE)) * 0.6 ** np.arange(SIZE)
        right = rng.standard_normal((SIZE, SIZE))
        if name == QUERY:
            left, right = np.diag(1.0 + rng.random(SIZE)), np.eye(SIZE) + 1e-3 * right
        tensors[f"{PREFIX}{name}.lora_A.weight"] = right
        tensors[f"{PREFIX}{name}.lora_B.weight"] = left
    config = {"r": SIZE, "lora_alpha": SIZE, "target_modules": ["query", "value"]}
    return open_checkpoint(write_lora_directory(folder, tensors, **config))


def test_a_structure_written_from_contributing_alone_keeps_the_contract(
    contributed: Callable[[np.random.Generator], Stored],
    monkeypatch: pytest.MonkeyPatch,
    source: Any,
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(STRUCTURES, "diagonal", contributed)
    stored = contributed(np.random.default_rng(0))
    check_index_and_bytes_say_what_is_stored(stored)
    check_peft_opens_it(stored, source, tmp_path / "peft")
    check_other_numbers_are_stored_alike(stored)
    check_a_directory_counts_it(stored, source, tmp_path / "out")
    test_every_encoding_has_a_structure_here()


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
@pytest.mark.usefixtures("contributed")
def test_it_is_chosen_counted_written_and_verified(storage: str, tmp_path: Path) -> None:
    lora = nearly_diagonal(tmp_path / "lora")
    plan = CompressionPlan(parameters=5 * SIZE, storage=storage)
    result = compress(lora, plan, search=QUICK)
    row = next(row for row in result.layers if row.name == QUERY)
    width = 4 if storage == "float32" else 2
    assert (row.structure, row.parameters, row.bytes) == ("diagonal", SIZE, width * SIZE)
    assert row.relative_error < 0.01
    written = open_checkpoint(result.save(tmp_path / "small", record=True))
    assert written.adapter_parameters == result.totals.parameters
    assert written.layer(QUERY).label == f"diagonal of {SIZE}"
    assert verify(lora, written).passed
    exported = open_checkpoint(export_lora(written, tmp_path / "exported", storage="float64"))
    assert verify(lora, exported).passed


def test_it_does_not_pass_for_truncated_svd(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    lora = nearly_diagonal(tmp_path / "lora")
    plan = CompressionPlan(parameters=5 * SIZE)
    without = compress(lora, plan, search=QUICK)
    request.getfixturevalue("contributed")
    result = compress(lora, plan, search=QUICK)
    assert result.error < 0.9 * without.error
    assert result.low_rank_error == without.low_rank_error


@pytest.mark.usefixtures("contributed")
@pytest.mark.parametrize(
    "entry", [[0, "float32"], [24.0, "float32"], [24, "int9"], [2**14, "float32"]]
)
def test_its_entries_are_checked_as_all_are(entry: list[Any]) -> None:
    with pytest.raises((ValueError, CheckpointError)):
        encodings.parse("diagonal", *entry)


def test_the_recipe_touches_at_most_six_files() -> None:
    section = CONTRIBUTING.read_text(encoding="utf-8").split("## Adding a structure")[1]
    steps = re.findall(r"^\d\. ", section.split("\n## ")[0], re.MULTILINE)
    assert 3 <= len(steps) <= 6
