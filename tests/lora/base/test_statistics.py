"""Statistics on disk: NumPy reads them, weights act as their matrices, damage is named."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources

import numpy as np
import pytest
from oracles import matrix_of
from safetensors.numpy import load_file, save_file

from lsrdecomp.errors import CheckpointError
from lsrdecomp.lora.files.statistics import DAMPING, Statistics, damped_weight, read_statistics
from lsrdecomp.targets.weights import LowRankPlusIdentity

ATTENTION = "layer.0.query"


def weight(size, rank, seed=0):
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((size, rank)))[0]
    return LowRankPlusIdentity(
        basis, np.sort(rng.uniform(1, 9, rank))[::-1].copy(), 0.5 if rank < size else 0.0
    )


@pytest.fixture
def directory(tmp_path):
    """Return statistics of a 6 × 5 layer: in side in full, out side with two eigenpairs."""
    tensors = {}
    for side, stored in (("input", weight(5, 5)), ("output", weight(6, 2))):
        tensors[f"{ATTENTION}.{side}.eigenvectors"] = stored.basis.astype(np.float32)
        tensors[f"{ATTENTION}.{side}.eigenvalues"] = stored.values.astype(np.float32)
        tensors[f"{ATTENTION}.{side}.rest"] = np.asarray(stored.rest, dtype=np.float32)
    save_file(tensors, tmp_path / "statistics.safetensors")
    (tmp_path / "statistics.json").write_text(
        json.dumps({"format": "lsrdecomp-statistics", "version": 1})
    )
    return tmp_path


def test_statistics_are_read_by_module_name(directory):
    statistics = read_statistics(directory)
    assert list(statistics) == [ATTENTION]
    layer = statistics.measured(ATTENTION)
    layer.check((6, 5))
    np.testing.assert_allclose(matrix_of(layer.input), matrix_of(weight(5, 5)), atol=1e-5)
    np.testing.assert_allclose(matrix_of(layer.output), matrix_of(weight(6, 2)), atol=1e-5)
    for read in (statistics.measured, statistics.__getitem__):
        with pytest.raises(KeyError):
            read("layer.1.query")


@pytest.mark.parametrize("field", ["settings", "examples", "layers", "made_with", "sha256"])
def test_an_edit_of_what_calibration_wrote_is_refused(tmp_path, field):
    pytest.importorskip("torch")
    from lsrdecomp.lora.base.accumulators import Counts
    from lsrdecomp.lora.base.statistics_files import write_statistics

    arrays = {f"{ATTENTION}.input.rest": np.asarray(0.5, np.float32)}
    settings = {"adapter_base": "tiny", "effect": 0.25}
    write_statistics(tmp_path, settings, arrays, {ATTENTION: {"shape": (6, 5)}}, Counts())
    assert read_statistics(tmp_path).metadata["settings"] == settings
    path = tmp_path / "statistics.json"
    metadata = json.loads(path.read_text())
    path.write_text(json.dumps(metadata | {field: "other"}))
    with pytest.raises(CheckpointError, match="changed since it was written"):
        read_statistics(tmp_path)
    # Other spaces and another order say the same.
    path.write_text(json.dumps(dict(reversed(metadata.items())), indent=1))
    read_statistics(tmp_path)


def test_reading_needs_no_torch(directory):
    code = (
        "import sys; from lsrdecomp.lora.files.statistics import read_statistics;"
        f"print(read_statistics({str(directory)!r})[{ATTENTION!r}].input.size, 'torch' in "
        "sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "5 False"


@pytest.mark.parametrize(("size", "rank"), [(7, 3), (7, 7), (4, 1)])
def test_a_weight_acts_as_its_matrix(size, rank):
    stored = weight(size, rank)
    matrix = matrix_of(stored)
    expected = stored.basis @ np.diag(stored.values) @ stored.basis.T
    expected += stored.rest * (np.eye(size) - stored.basis @ stored.basis.T)
    np.testing.assert_allclose(matrix, expected, atol=1e-12)
    x = np.random.default_rng(1).standard_normal((size, 3))
    np.testing.assert_allclose(stored.root(stored.root(x)), matrix @ x, atol=1e-12)
    expected = matrix + 0.1 * np.trace(matrix) / size * np.eye(size)
    np.testing.assert_allclose(matrix_of(damped_weight(stored, 0.1)), expected, atol=1e-12)


def test_solver_weights_are_the_damped_ones(directory):
    statistics = read_statistics(directory)
    norm, layer = statistics[ATTENTION], statistics.measured(ATTENTION)
    norm.check((6, 5))
    for side in ("input", "output"):
        damped = damped_weight(getattr(layer, side), DAMPING)
        np.testing.assert_allclose(matrix_of(getattr(norm, side)), matrix_of(damped), atol=1e-12)


def test_layers_keep_their_eigenpairs_apart():
    rng = np.random.default_rng(0)
    basis, _ = np.linalg.qr(rng.standard_normal((1025, 2)))
    weight = damped_weight(LowRankPlusIdentity(basis, np.array([3.0, 2.0]), 0.1), 0.1)
    assert weight.basis.shape == (1025, 2)
    added = 0.1 * (5.0 + 1023 * 0.1) / 1025
    np.testing.assert_allclose(
        weight.apply(basis), basis * np.array([3.0 + added, 2.0 + added]), atol=1e-12
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{ATTENTION}.output.rest"), r"layer\.0\.query\.output\.rest: missing"),
        (
            lambda t: t.update({f"{ATTENTION}.input.rest": np.zeros(2, np.float32)}),
            r"rest \(2,\); expected",
        ),
        (
            lambda t: t.update({f"{ATTENTION}.input.eigenvalues": np.ones(4, np.float32)}),
            r"eigenvalues \(4,\)",
        ),
        (
            lambda t: t.update({f"{ATTENTION}.input.eigenvalues": -np.ones(5, np.float32)}),
            "positive semidefinite",
        ),
        (
            lambda t: t.update({f"{ATTENTION}.input.eigenvalues": np.full(5, np.nan, np.float32)}),
            "NaN",
        ),
    ],
)
def test_damaged_statistics_are_named(directory, change, message):
    tensors = load_file(directory / "statistics.safetensors")
    change(tensors)
    save_file(tensors, directory / "statistics.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read_statistics(directory)[ATTENTION]


def test_other_formats_and_versions_are_refused(directory):
    (directory / "statistics.json").write_text(
        json.dumps({"format": "lsrdecomp-statistics", "version": 9})
    )
    with pytest.raises(CheckpointError, match="version 9, this release reads 1"):
        read_statistics(directory)
    (directory / "statistics.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(CheckpointError, match="format None, expected 'lsrdecomp-statistics'"):
        read_statistics(directory)
    with pytest.raises(CheckpointError, match="no such file"):
        read_statistics(directory / "absent")


def test_eigenvectors_that_are_not_orthonormal_are_refused(directory):
    tensors = load_file(directory / "statistics.safetensors")
    name = f"{ATTENTION}.input.eigenvectors"
    save_file(
        tensors | {name: tensors[name] * np.float32(1.1)}, directory / "statistics.safetensors"
    )
    with pytest.raises(
        CheckpointError, match=r"input.eigenvectors: .* not orthonormal: VᵀV differs from I by 0.21"
    ):
        read_statistics(directory)[ATTENTION]


def test_half_precision_eigenvectors_are_orthonormal_again(directory):
    tensors = load_file(directory / "statistics.safetensors")
    halves = {
        name: value.astype(np.float16) if "vectors" in name else value
        for name, value in tensors.items()
    }
    save_file(halves, directory / "statistics.safetensors")
    side = read_statistics(directory).measured(ATTENTION).input
    np.testing.assert_allclose(side.basis.T @ side.basis, np.eye(5), atol=1e-12)
    np.testing.assert_allclose(matrix_of(side), matrix_of(weight(5, 5)), atol=2e-2)


@pytest.mark.parametrize(("kind", "checks"), [(np.float32, 1), (np.float16, 2)])
def test_read_again_eigenvectors_are_not_checked_again(directory, monkeypatch, kind, checks):
    tensors = load_file(directory / "statistics.safetensors")
    stored = {
        name: value.astype(kind) if "vectors" in name else value for name, value in tensors.items()
    }
    save_file(stored, directory / "statistics.safetensors")
    statistics, check, seen = read_statistics(directory), Statistics._orthonormalized, []

    def counted(self, name, *rest):
        seen.append(name)
        return check(self, name, *rest)

    monkeypatch.setattr(Statistics, "_orthonormalized", counted)
    first, second = (statistics[ATTENTION].input.basis for _ in range(2))
    assert np.array_equal(first, second)
    assert len(seen) == 2 * checks  # of both sides


@pytest.mark.parametrize(
    ("declared", "fits"),
    [("someone/Small", True), ("/here/small", True), (None, True), ("other", False)],
)
def test_an_adapter_of_another_base_is_refused_by_name(directory, declared, fits):
    about = {
        "format": "lsrdecomp-statistics",
        "version": 1,
        "settings": {"adapter_base": "/there/small"},
    }
    (directory / "statistics.json").write_text(json.dumps(about))
    statistics = read_statistics(directory)
    if fits:
        statistics.check_base(declared)
    else:
        with pytest.raises(
            CheckpointError, match=r"of base /there/small, and the adapter is for other; calibrate"
        ):
            statistics.check_base(declared)


def test_one_flipped_bit_in_written_statistics_is_refused(tmp_path):
    files = pytest.importorskip("lsrdecomp.lora.base.statistics_files")
    sizes = {
        "eigenvectors": np.eye(4, dtype=np.float16),
        "eigenvalues": np.ones(4, np.float32),
        "rest": np.float32(0.5),
    }
    tensors = {
        f"q.{side}.{part}": np.asarray(value)
        for side in ("input", "output")
        for part, value in sizes.items()
    }
    files.write_statistics(tmp_path, {}, tensors, {}, files.Counts())
    assert list(read_statistics(tmp_path)) == ["q"]
    path = tmp_path / "statistics.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    with pytest.raises(
        CheckpointError, match=r"statistics.safetensors: changed since it was written: its SHA-256"
    ):
        read_statistics(tmp_path)


def test_one_flipped_bit_in_the_statistics_of_the_demo_is_refused(tmp_path):
    for path in (resources.files("lsrdecomp.cli") / "demo_statistics").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert len(read_statistics(tmp_path)) == 12
    path = tmp_path / "statistics.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="changed since it was written"):
        read_statistics(tmp_path)
