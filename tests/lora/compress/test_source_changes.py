"""A source that is written over while it is read: nothing is made of half of each."""

import os

import pytest
from checkpoint_files import lora_pair, write_lora_directory
from safetensors.numpy import load_file, save_file

from lsrdecomp.errors import CheckpointError
from lsrdecomp.lora.compress.export import export_lora
from lsrdecomp.lora.compress.truncate import truncate
from lsrdecomp.lora.files import file_checks as files
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.search.plan import CompressionPlan, Resources, Search
from lsrdecomp.lora.search.searched import search_adapter

QUICK = Search(orders=(2,), rounds=0, sweeps=4)
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def source(tmp_path):
    tensors = {}
    for number in range(4):
        tensors |= lora_pair(f"layers.{number}.q", 24, 24, 4, number)
    folder = write_lora_directory(tmp_path / "source", tensors, r=4)
    # Of an hour ago: its times tell of later changes.
    an_hour_ago = (folder / WEIGHTS).stat().st_mtime - 3600
    os.utime(folder / WEIGHTS, (an_hour_ago, an_hour_ago))
    return open_checkpoint(folder)


def negate_half(path, *, in_place=True):
    """What a training run saves over it: B of the second half times −1."""
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    tensors = load_file(path)
    for key in tensors:
        if "lora_B" in key and ("layers.2" in key or "layers.3" in key):
            tensors[key] = -tensors[key]
    if in_place:
        whole = path.with_suffix(".new")
        save_file(tensors, whole, metadata={"format": "pt"})
        with path.open("r+b") as file:
            file.write(whole.read_bytes())
        whole.unlink()
    else:
        path.unlink()
        save_file(tensors, path, metadata={"format": "pt"})
    os.utime(path, ns=times)  # as a careful copy sets them


def compressed(source, out, on_step):
    plan = CompressionPlan(ratio=4)
    resources = Resources(on_step=on_step)
    return (
        search_adapter(source, [plan], search=QUICK, resources=resources).compress(plan).save(out)
    )


def given_terms(source, out, on_step):
    plan = CompressionPlan(separation_rank=2)
    return (
        search_adapter(source, [plan], resources=Resources(on_step=on_step))
        .compress(plan)
        .save(out)
    )


def cut(source, out, on_step):
    return truncate(source, ratio=2, on_step=on_step).save(out)


def exported(source, out, on_step):
    """Between the first layer and the second."""
    layers = source.layers

    class Watched(tuple):
        __slots__ = ()

        def __iter__(self):
            for layer in layers:
                yield layer
                on_step(None)

    object.__setattr__(source, "layers", Watched(layers))
    return export_lora(source, out)


ROADS = [compressed, given_terms, cut, exported]


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("road", ROADS)
def test_a_source_that_changes_while_it_is_read_is_refused(source, tmp_path, road, in_place):
    seen = []

    def on_step(step):
        if len(seen) == 1:
            negate_half(source.weights, in_place=in_place)
        seen.append(step)

    with pytest.raises(CheckpointError, match=f"{WEIGHTS}: changed while it was read"):
        road(source, tmp_path / "out", on_step)
    assert not (tmp_path / "out").exists()
    assert len(seen) > 1


@pytest.mark.parametrize("road", ROADS)
def test_a_source_that_was_touched_or_copied_onto_itself_is_no_other(source, tmp_path, road):
    content = source.weights.read_bytes()
    seen = []

    def on_step(step):
        if len(seen) == 1:
            source.weights.unlink()
            source.weights.write_bytes(content)
        seen.append(step)

    assert road(source, tmp_path / "out", on_step).is_dir()


def test_a_source_of_this_moment_is_read_through_again(source, tmp_path):
    """Its times do not tell: file systems count them in steps."""
    os.utime(source.weights)
    source.watch_source()
    status = source.weights.stat()
    negate_half(source.weights)
    assert status.st_size == source.weights.stat().st_size
    with pytest.raises(CheckpointError, match="changed while it was read"):
        truncate(source, ratio=2).save(tmp_path / "out")


def test_a_file_whose_times_say_that_nobody_wrote_is_not_read_again(source, monkeypatch):
    reading = files.FileReading.of(source.weights, clock_step=0.0)
    assert not reading.is_fresh

    def refuse(path):
        raise AssertionError(path)

    monkeypatch.setattr(files, "sha256", refuse)
    reading.check_unchanged()


def test_a_source_that_is_gone_is_told(source, tmp_path):
    result = truncate(source, ratio=2)
    source.weights.unlink()
    with pytest.raises(CheckpointError):
        result.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()
