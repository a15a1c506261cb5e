"""One reader under atheris: python tests/damage/harness.py READER [libFuzzer options] [corpus].

Also replays a find: python tests/damage/harness.py READER crash-file
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

FOLDER = "LSRDECOMP_FUZZ_FOLDER"
"""Where fuzz.py wants the files: libFuzzer ends the process before anything could be tidied."""

INSTRUMENTED = ["lsrdecomp", "json", "tomllib", "zipfile", "torch._weights_only_unpickler"]


def main(arguments: list[str]) -> None:
    """Fuzz until the options say stop; libFuzzer ends the process itself."""
    import atheris

    name, *options = arguments
    warnings.simplefilter("ignore")
    with atheris.instrument_imports(include=INSTRUMENTED):
        from damage import MAX_BYTES, READERS, corpus

        if READERS[name].torch:
            import torch  # noqa: F401
    chosen = READERS[name]
    with tempfile.TemporaryDirectory(dir=os.environ.get(FOLDER, memory_folder())) as folder:
        if not any(not option.startswith("-") and Path(option).is_file() for option in options):
            contents = Path(folder) / "corpus"
            contents.mkdir()
            for number, content in enumerate(corpus(name)):
                (contents / str(number)).write_bytes(content)
            options = [
                f"-max_len={MAX_BYTES}",
                "-timeout=300",
                "-rss_limit_mb=4096",
                *options,
                str(contents),
            ]
        place = Path(folder) / "work"
        place.mkdir()
        atheris.Setup([sys.argv[0], *options], lambda content: chosen(content, place))
        atheris.Fuzz()


def memory_folder() -> str | None:
    """Return a file system in memory, where there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    main(sys.argv[1:])
