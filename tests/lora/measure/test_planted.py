"""Changes planted in written adapters: the digests in their headers find each, with nothing beside.

SHA256SUMS, card and report are taken away before, so that a directory is weights and config alone.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import PREFIX, lora_pair, write_lora_directory
from console import run_command
from drawing import drawing
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from lsrdecomp import compress
from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.lora.compress.export import export_lora
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.digests import SEAL_BYTES, ContentDigests
from lsrdecomp.lora.files.file_checks import SUMS
from lsrdecomp.lora.files.packed import NUMBERS
from lsrdecomp.lora.files.tensors import LENGTH_BYTES
from lsrdecomp.lora.measure.verify_files import accept, verify
from lsrdecomp.lora.search.plan import CompressionPlan

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BESIDE = (SUMS, "README.md", "compression.json")
NAMES = ("layers.0.q", "layers.1.q", "layers.1.v")
DIRECTORIES = ("lsr-float32", "lsr-int4", "lora")
FILES = ("kohya", "diffusers")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A LoRA with a head, and what was written from it; not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    tensors = {f"{PREFIX}classifier.weight": np.ones((2, 16), np.float32)}
    for seed, name in enumerate(NAMES):
        tensors |= lora_pair(name, 16, 16, 4, seed)
    settings = {"r": 4, "modules_to_save": ["classifier"], "task_type": "SEQ_CLS"}
    source = open_checkpoint(write_lora_directory(folder / "source", tensors, **settings))
    for storage in ("float32", "int4"):
        plan = CompressionPlan(separation_rank=2, storage=storage)
        compress(source, plan).save(folder / f"lsr-{storage}")
    export_lora(open_checkpoint(folder / "lsr-float32"), folder / "lora")
    # Names as image programs have them, in a source of its own.
    unet = {
        key.replace(f"{PREFIX}layers.", "unet.mid_block.attentions."): array
        for key, array in tensors.items()
        if "classifier" not in key
    }
    save_file(unet, folder / "style.safetensors")
    for to in FILES:
        style = open_checkpoint(folder / "style.safetensors")
        export_lora(style, folder / f"{to}.safetensors", to=to)
    return folder


def source_of(made, kind):
    return open_checkpoint(made / ("style.safetensors" if kind in FILES else "source"))


def bare_copy(made, kind, to):
    """Weights and config of what was written, without anything that vouches for them."""
    if kind in FILES:
        return shutil.copy(made / f"{kind}.safetensors", to)
    shutil.copytree(made / kind, to)
    for name in BESIDE:
        (to / name).unlink(missing_ok=True)
    return to


def weights_of(place):
    return place / WEIGHTS if place.is_dir() else place


def is_found(source, place):
    """Whether a change is refused by a reader, or found by `verify`."""
    try:
        return not verify(source, open_checkpoint(place)).passed
    except LsrError:
        return True


# -- configs ---------------------------------------------------------------------------------------

EDITS = {
    "target_modules": ["q"],
    "target_modules as text": "q|v",
    "layers_to_transform": [0],
    "layers_pattern": "layers",
    "exclude_modules": ["v"],
    "modules_to_save": ["classifier", "score"],
    "modules_to_save, none": None,
    "fan_in_fan_out": True,
    "base_model_name_or_path": "another",
    "revision": "main",
    "task_type": "TOKEN_CLS",
    "bias": "all",
    "auto_mapping": {"base_model_class": "GPT2LMHeadModel"},
    "inference_mode": False,
    "lora_dropout": 0.5,
}


@pytest.mark.parametrize("field", EDITS)
@pytest.mark.parametrize("kind", DIRECTORIES)
def test_an_edit_of_the_config_is_found_without_any_other_record(made, tmp_path, kind, field):
    place = bare_copy(made, kind, tmp_path / "o")
    source = source_of(made, kind)
    assert verify(source, open_checkpoint(place)).passed
    path = place / CONFIG
    config = json.loads(path.read_text())
    edited = config | {field.partition(" ")[0].rstrip(","): EDITS[field]}
    assert edited != config
    path.write_text(json.dumps(edited))
    assert is_found(source, place)


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_another_order_and_other_spaces_of_the_config_are_no_change(made, tmp_path, kind):
    place = bare_copy(made, kind, tmp_path / "o")
    config = json.loads((place / CONFIG).read_text())
    backwards = dict(reversed(config.items()))
    (place / CONFIG).write_text(json.dumps(backwards, indent=4))
    assert verify(source_of(made, kind), open_checkpoint(place)).passed


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DIRECTORIES + FILES)
def test_a_flipped_bit_anywhere_in_the_weights_is_found(made, tmp_path, kind):
    place = bare_copy(made, kind, tmp_path / "o.safetensors")
    source = source_of(made, kind)
    path = weights_of(place)
    sound = path.read_bytes()
    header_end = LENGTH_BYTES + int.from_bytes(sound[:LENGTH_BYTES], "little")
    in_header = np.linspace(0, header_end - 1, 12).astype(int)
    in_numbers = np.linspace(header_end, len(sound) - 1, 24).astype(int)
    missed = []
    for number, position in enumerate((*in_header, *in_numbers)):
        content = bytearray(sound)
        content[position] ^= 1 << number % 8
        path.write_bytes(content)
        if not is_found(source, place):
            missed.append((position, number % 8))
    assert missed == []


def last_bit(tensors, key, row):
    """The smallest change of one number that its type can tell."""
    bits = tensors[key].view(np.uint8).reshape(-1)
    bits[row * tensors[key].itemsize] ^= 1


def negated(tensors, key, row):
    flat = tensors[key].reshape(-1)
    flat[row] = -flat[row] if flat.dtype.kind == "f" else 255 - flat[row]


def doubled(tensors, key, _):
    tensors[key] = tensors[key] * tensors[key].dtype.type(2)


def exchanged_rows(tensors, key, row):
    flat = tensors[key].reshape(-1)
    flat[[row, row + 1]] = flat[[row + 1, row]]


def renamed(tensors, key, _):
    tensors[key.replace("layers.1", "layers.2").replace("classifier", "score")] = tensors.pop(key)


PLANTS = (last_bit, negated, doubled, exchanged_rows, renamed)


def planted(path, plant, key, row):
    """Change numbers under the header that a file has; return whether anything changed."""
    metadata = dict(open_checkpoint(path).metadata)
    before = load_file(path)
    tensors = {name: array.copy() for name, array in before.items()}
    plant(tensors, key, row)
    save_file(tensors, path, metadata=metadata)
    same_bits = {name: array.tobytes() for name, array in before.items()} == {
        name: array.tobytes() for name, array in tensors.items()
    }
    return not same_bits


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("kind", DIRECTORIES + FILES)
@drawing(0.4)
@given(st.data())
def test_planted_changes_of_numbers_are_found(made, tmp_path_factory, kind, plant, data):
    place = bare_copy(made, kind, tmp_path_factory.mktemp("planted") / "o.safetensors")
    path = weights_of(place)
    keys = sorted(name for name, array in load_file(path).items() if array.size > 8)
    key = data.draw(st.sampled_from(keys))
    changed = planted(path, plant, key, data.draw(st.integers(0, 6)))
    assert not changed or is_found(source_of(made, kind), place)


def test_descriptions_of_an_image_file_may_be_edited(made, tmp_path):
    path = bare_copy(made, "kohya", tmp_path / "style.safetensors")
    metadata = dict(open_checkpoint(path).metadata) | {"modelspec.title": "ink", "ss_tag": "blue"}
    save_file(load_file(path), path, metadata=metadata)
    assert verify(source_of(made, "kohya"), open_checkpoint(path)).passed
    save_file(load_file(path), path, metadata=metadata | {"lora_adapter_metadata": "{}"})
    assert is_found(source_of(made, "kohya"), path)


# -- what lies beside, and the way out -------------------------------------------------------------


@pytest.mark.parametrize("name", ["adapter_model.bin", "modeling.py", "other.safetensors"])
@pytest.mark.parametrize("has_sums", [True, False])
def test_a_file_that_programs_load_and_nobody_wrote_is_named(made, tmp_path, name, has_sums):
    place = tmp_path / "o"
    shutil.copytree(made / "lora", place)
    if not has_sums:
        (place / SUMS).unlink()
    (place / name).write_bytes(b"anything")
    done = run_command("verify", made / "source", place)
    assert done.returncode == 1
    assert f"{name} was not written with this adapter" in done.stderr
    assert f"rm {place / name}" in done.stderr
    refused = run_command("verify", made / "source", place, "--accept")
    assert refused.returncode == 2
    assert f"{name} was not written with it; remove it" in refused.stderr


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_a_lost_file_of_digests_is_said_and_recorded_again_by_the_command_that_is_named(
    made, tmp_path, kind
):
    place = tmp_path / "o"
    shutil.copytree(made / kind, place)
    (place / SUMS).unlink()
    done = run_command("verify", made / "source", place)
    assert done.returncode == 3
    assert f"{place} has lost its SHA256SUMS" in done.stderr
    command = done.stderr.strip().rpartition("lsrdecomp ")[2].split()
    assert command == ["verify", str(made / "source"), str(place), "--accept"]
    assert run_command(*command).returncode == 0
    assert run_command("verify", made / "source", place).returncode == 0


def numbers_without_seal(place: Path) -> dict[str, bytes]:
    """The bytes of all tensors but those that seal an LSR directory."""
    numbers = {key: array.tobytes() for key, array in load_file(place / WEIGHTS).items()}
    if NUMBERS in numbers:
        numbers[NUMBERS] = numbers[NUMBERS][:-SEAL_BYTES]
    return numbers


@pytest.mark.parametrize("kind", DIRECTORIES)
@pytest.mark.parametrize("beside", [True, False])
def test_a_base_that_moved_is_told_and_may_be_accepted(made, tmp_path, kind, beside):
    place = tmp_path / "o"
    if beside:
        shutil.copytree(made / kind, place)
    else:
        bare_copy(made, kind, place)
    config = json.loads((place / CONFIG).read_text()) | {"base_model_name_or_path": "/elsewhere"}
    (place / CONFIG).write_text(json.dumps(config))
    done = run_command("verify", made / "source", place)
    assert done.returncode == 1
    assert CONFIG in done.stderr
    named = f"changed in {CONFIG}: base_model_name_or_path\n" in done.stderr
    assert named == (beside and kind != "lora")
    with pytest.raises(CheckpointError, match="--accept"):
        export_lora(open_checkpoint(place), tmp_path / "no")
    before = numbers_without_seal(place)
    assert run_command("verify", made / "source", place, "--accept").returncode == 0
    assert run_command("verify", made / "source", place).returncode == 0
    assert numbers_without_seal(place) == before
    # And what is accepted is held to its new digests.
    (place / SUMS).unlink()
    (place / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": "tiny"}))
    assert not verify(source_of(made, kind), open_checkpoint(place)).passed


@pytest.mark.parametrize("kind", DIRECTORIES + FILES)
@pytest.mark.parametrize("plant", [last_bit, negated])
def test_other_numbers_are_not_accepted(made, tmp_path, kind, plant):
    place = bare_copy(made, kind, tmp_path / "o.safetensors")
    path = weights_of(place)
    largest = max(load_file(path).items(), key=lambda pair: pair[1].size)[0]
    assert planted(path, plant, largest, 3)
    check = verify(source_of(made, kind), open_checkpoint(place))
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="numbers are not those that were written"):
        accept(open_checkpoint(place), check)
    assert path.read_bytes() == before


def test_an_adapter_saved_again_by_another_program_has_no_record_until_it_is_accepted(
    made, tmp_path
):
    """As PEFT saves it: without our header, card and sums, its config in other words."""
    place = bare_copy(made, "lora", tmp_path / "o")
    save_file(load_file(place / WEIGHTS), place / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((place / CONFIG).read_text()) | {"inference_mode": False}
    (place / CONFIG).write_text(json.dumps(config))
    done = run_command("verify", made / "source", place)
    assert done.returncode == 3
    assert "has no record of what was written" in done.stderr
    assert run_command("verify", made / "source", place, "--accept").returncode == 0
    assert run_command("verify", made / "source", place).returncode == 0
    assert ContentDigests.read(open_checkpoint(place).metadata) is not None


def test_many_changed_fields_are_named_in_one_short_line(made, tmp_path):
    """As PEFT writes a config anew, with every field that it knows."""
    place = tmp_path / "o"
    shutil.copytree(made / "lsr-float32", place)
    config = json.loads((place / CONFIG).read_text()) | {f"field_{i}": i for i in range(20)}
    (place / CONFIG).write_text(json.dumps(config))
    done = run_command("verify", made / "source", place)
    assert "field_0, field_1, field_10" in done.stderr
    assert "and 12 more" in done.stderr
    assert run_command("verify", made / "source", place, "--accept").returncode == 0


def test_a_file_with_no_place_for_a_digest_is_not_accepted(made, tmp_path):
    torch = pytest.importorskip("torch")
    tensors = load_file(made / "kohya.safetensors")
    state = {key: torch.from_numpy(array) for key, array in tensors.items()}
    torch.save(state, tmp_path / "style.pt")
    done = run_command("verify", made / "style.safetensors", tmp_path / "style.pt", "--accept")
    assert done.returncode == 2
    assert "a file that ends in .pt takes no digest later" in done.stderr
