"""Run PEFT's own adapter tests against one of our adapter kinds; see README.md beside this file."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = (
    "test_custom_models.py",
    "test_decoder_models.py",
    "test_encoder_decoder_models.py",
    "test_feature_extraction_models.py",
    "test_seq_classifier.py",
    "test_token_classification_qa.py",
    "test_target_parameters.py",
    "test_config.py",
    "test_lora_conversion.py",
    "test_low_level_api.py",
    "test_other.py",
    "test_quantization.py",
    "test_tuners_utils.py",
    "test_initialization.py",
    "test_mixed.py",
)


def peft_tests(work: Path) -> Path:
    """The root of PEFT's sources: PEFT_SOURCE, or those of the installed PEFT, fetched once."""
    source = os.environ.get("PEFT_SOURCE")
    if source:
        return Path(source).resolve()
    name = f"peft-{version('peft')}"
    if not (work / name / "tests").is_dir():
        work.mkdir(parents=True, exist_ok=True)
        fetch = [
            "download",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--no-binary",
            ":all:",
            "--dest",
            str(work),
        ]
        subprocess.run([sys.executable, "-m", "pip", *fetch, name.replace("-", "==")], check=True)
        with tarfile.open(work / f"{name}.tar.gz") as archive:
            archive.extractall(work, filter="data")
    (work / name / "tests" / "__init__.py").touch()  # they import one another relatively
    return work / name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--kind", default="lsr", help="adapter kind, or lora for PEFT's own as a control"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(".peft-suite"),
        help="folder for the download and the models",
    )
    options, rest = parser.parse_known_args()
    work = options.work.resolve()
    root = peft_tests(work)
    sys.path.insert(0, str(HERE))
    from models import make_models

    make_models(work / "models")
    environment = {
        **os.environ,
        "LSR_SUITE_KIND": options.kind,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(root), os.environ.get("PYTHONPATH", "")]),
    }
    chosen = [part for part in rest if part in FILES]
    rest = [part for part in rest if part not in FILES]
    files = [str(root / "tests" / name) for name in chosen or FILES]
    pytest_options = [
        "-p",
        "substitute",
        "-o",
        "addopts=",
        "-c",
        os.devnull,
        "--rootdir",
        str(root),
        "-q",
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *pytest_options,
        *(rest if any(".py" in part for part in rest) else files + rest),
    ]
    # Model names are looked up as folders first, so running beside them replaces the hub.
    return subprocess.run(command, cwd=work / "models", env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
