"""PEFT knows LSR once `lsrdecomp.lora.peft` is imported, and only then."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import tomllib
from enum import Enum
from pathlib import Path

import processes
import pytest
from adapters_support import write_lsr_directory
from peft import PeftConfig
from peft.mapping import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_PREFIX_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
)
from peft.utils.peft_types import PeftType

from lsrdecomp.errors import LsrError
from lsrdecomp.lora import peft as adapters
from lsrdecomp.lora.peft import LsrConfig, LsrModel
from lsrdecomp.lora.peft.register import add_member, register


def without_the_import(folder):
    """What a process sees that has imported neither PEFT nor this package."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("peft", "lsrdecomp")]:
        del sys.modules[name]
    import lsrdecomp

    lsrdecomp.open_checkpoint(folder)
    from peft import PeftConfig

    assert not [
        finder for finder in sys.meta_path if type(finder).__module__.startswith("lsrdecomp")
    ]
    with pytest.raises(KeyError, match="LSR"):
        PeftConfig.from_pretrained(folder)
    import lsrdecomp.lora.peft

    assert type(PeftConfig.from_pretrained(folder)).__name__ == "LsrConfig"


def test_the_enum_member_is_a_real_one():
    member = PeftType.LSR
    assert isinstance(member, PeftType)
    assert isinstance(member, str)
    assert member is PeftType("LSR") is PeftType["LSR"]
    assert (member.name, member.value, member == "LSR", f"{member.value}") == (
        "LSR",
        "LSR",
        True,
        "LSR",
    )
    assert member in PeftType
    assert "LSR" in list(PeftType)
    assert list(PeftType).count(member) == 1
    assert len(PeftType) == len(PeftType.__members__)
    assert pickle.loads(pickle.dumps(member)) is member
    assert copy.deepcopy(member) is member
    assert hash(member) == hash(PeftType("LSR"))
    with pytest.raises(AttributeError):
        PeftType.LSR = "other"


def test_registering_twice_changes_nothing():
    before = (dict(PEFT_TYPE_TO_CONFIG_MAPPING), list(PeftType))
    assert register("lsr", LsrConfig, LsrModel) is PeftType.LSR
    assert (dict(PEFT_TYPE_TO_CONFIG_MAPPING), list(PeftType)) == before
    assert PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LSR] is LsrModel
    assert PEFT_TYPE_TO_PREFIX_MAPPING[PeftType.LSR] == LsrModel.prefix == "lsr_"


def test_a_name_that_means_something_else_is_refused():
    with pytest.raises(LsrError, match="LORA already belongs to peft"):
        register("lora", LsrConfig, LsrModel)


def test_a_member_is_added_to_any_string_enum():
    class Colour(str, Enum):  # noqa: UP042 PEFT's own enum is declared so
        RED = "RED"

    blue = add_member(Colour, "BLUE")
    assert Colour.BLUE is blue is Colour("BLUE") is add_member(Colour, "BLUE")
    assert list(Colour) == ["RED", "BLUE"]
    assert add_member(Colour, "RED") is Colour.RED


def test_a_fresh_process_needs_the_import_and_nothing_else_teaches_peft(tmp_path):
    write_lsr_directory(tmp_path, {"lin": ((2, 2), (1, 2), (2, 2))})
    process = processes.start_process(without_the_import, str(tmp_path))
    process.join()
    assert process.exitcode == 0


def test_packages_of_methods_are_told_of_every_kind():
    """What PEFT with docs/evidence/upstream-peft.patch reads from installed packages."""
    project = tomllib.loads(
        (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    )["project"]
    ours = {
        cls
        for cls in map(vars(adapters).get, adapters.__all__)
        if isinstance(cls, type) and issubclass(cls, PeftConfig)
    }
    kinds = {str(kind.value) for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items() if cls in ours}
    assert project["entry-points"]["peft.methods"] == dict.fromkeys(kinds, "lsrdecomp.lora.peft")


def test_the_settings_survive_their_file(tmp_path):
    config = LsrConfig(
        r=6,
        inner_shape=[3, 2],
        separation_rank=[4, 2],
        shape_pattern={"q": {side: [2, 3] for side in ("out", "inner", "into")}},
    )
    config.save_pretrained(tmp_path)
    assert (
        json.loads((tmp_path / "adapter_config.json").read_text())["load_with"]
        == "import lsrdecomp.lora.peft"
    )
    assert PeftConfig.from_pretrained(str(tmp_path)) == config
