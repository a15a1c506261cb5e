"""A LoRA cut in its own format by its effect on a base: smaller for the share, true as written."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("transformers")
pytest.importorskip("PIL", reason="tiny models of images are written by Pillow")

from own_models import own_model  # noqa: E402

from lsrdecomp.errors import BudgetError, UnsupportedError  # noqa: E402
from lsrdecomp.fields import SettingsError  # noqa: E402
from lsrdecomp.lora.base.base_model import own_base  # noqa: E402
from lsrdecomp.lora.base.divergence import Reference  # noqa: E402
from lsrdecomp.lora.compress import truncate  # noqa: E402
from lsrdecomp.lora.files import open_checkpoint  # noqa: E402
from lsrdecomp.lora.files.tensors import read_header  # noqa: E402


def test_the_fewest_numbers_keep_the_share_in_the_loras_own_format(tmp_path):
    model, data, lora = own_model(tmp_path, rank=8)
    source = open_checkpoint(lora)
    cut = truncate(source, base=model, data=data, keep=0.8)
    assert cut.fidelity.kept >= 0.8
    assert cut.parameters < source.adapter_parameters
    written = open_checkpoint(cut.save(tmp_path / "small"))
    assert written.format == source.format
    # What stands in the record is what the file keeps, on inputs that nothing has seen.
    base = own_base(model)
    fresh = [{"0": torch.randn(2000, 12) * torch.linspace(0.05, 2.0, 12)}]
    found = Reference(base.with_adapter(lora), fresh).compare(base.with_adapter(tmp_path / "small"))
    assert found.kept == pytest.approx(cut.fidelity.kept, abs=0.06)
    record = json.loads(read_header(written.weights).metadata["lsrdecomp"])
    assert record["promise"]["kept"] == cut.fidelity.kept
    # The error that is recorded is of the weights, as of every other cut.
    assert record["recorded"]["total"] == pytest.approx(cut.written_error(tmp_path / "small"))


def test_a_size_is_filled_with_what_acts_most(tmp_path):
    """Inputs are far from isotropic, so that energy alone chooses other components."""
    model, data, lora = own_model(tmp_path, rank=8)
    cut = truncate(open_checkpoint(lora), base=model, data=data, ratio=4)
    assert cut.parameters <= cut.parameters_before / 4
    assert cut.fidelity.kept > cut.by_energy.kept + 0.05
    assert len(cut.tried) == 1


def test_an_error_of_the_outputs_is_no_error_of_the_weights(tmp_path):
    model, data, lora = own_model(tmp_path, rank=8)
    source = open_checkpoint(lora)
    cut = truncate(source, base=model, data=data, ratio=4)
    plain = truncate(source, parameters=float(cut.parameters))
    small, other = cut.save(tmp_path / "small"), plain.save(tmp_path / "plain")
    assert cut.relative_error < cut.written_error(small)
    assert cut.written_error(small) > plain.written_error(other)


def test_what_cannot_be_is_refused(tmp_path):
    model, data, lora = own_model(tmp_path)
    source = open_checkpoint(lora)
    with pytest.raises(UnsupportedError, match="own format, not of mlx"):
        truncate(source, base=model, data=data, ratio=2, to="mlx")
    with pytest.raises(BudgetError, match="give data= with base="):
        truncate(source, base=model, ratio=2)
    with pytest.raises(SettingsError, match="keep is read with base="):
        truncate(source, keep=0.9)
