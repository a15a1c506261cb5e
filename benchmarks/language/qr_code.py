"""A compressed LoRA as one QR code: drawn, read back from the picture, opened by PEFT, and asked.

python -m benchmarks.language.qr_code small/ --lora my-lora/ --base smollm2 --held held.jsonl

``small/`` is what `lsrdecomp compress --bare` wrote: its two files become a zip, the zip a code.
That is then read from the picture alone, unpacked into a new directory, and answers the first
prompts of ``--held`` beside the LoRA and the base. Needs segno, zxing-cpp and Pillow.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks import record as records
from benchmarks.record import RESULTS

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
FILES = ("adapter_config.json", "adapter_model.safetensors")
LARGEST = 2953
"""Bytes that the largest code (version 40, level L) holds."""
NEW_TOKENS = 40
"""Tokens that are written to a prompt, at most."""


def packed(folder: Path) -> bytes:
    """Return the files of a compressed LoRA as a zip that is the same in each run."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in FILES:
            # Short dates and rights: each file has an entry of its own in both lists of a zip
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, (folder / name).read_bytes(), compresslevel=9)
    return buffer.getvalue()


def draw(payload: bytes, path: Path) -> str:
    """Draw a code at the highest level of correction that holds the bytes; return its name."""
    import segno

    code = segno.make_qr(payload, mode="byte", error="l", boost_error=True)
    code.save(str(path), scale=4, border=4)
    return str(code.designator)


def read(path: Path) -> bytes:
    """Return the bytes of the one code in a picture."""
    import zxingcpp
    from PIL import Image

    (code,) = zxingcpp.read_barcodes(Image.open(path).convert("L"))
    return bytes(code.bytes)


def unpacked(payload: bytes, folder: Path) -> Path:
    """Write the files of a zip, those two alone, and return the directory."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(payload)) as archive:
        for name in FILES:
            (folder / name).write_bytes(archive.read(name))
    return folder


def answers(base: str, adapters: dict[str, Path], prompts: list[str]) -> list[dict[str, str]]:
    """Return what the base and each adapter write to the prompts."""
    from lsrdecomp.lora.base.divergence import without_delta
    from lsrdecomp.lora.base.generation import generate
    from lsrdecomp.lora.base.open_bases import load_base

    written: dict[str, list[str]] = {}
    for name, path in adapters.items():
        opened = load_base(base, path)
        if not written:
            with without_delta(opened.model):
                written["the base"] = generate(
                    opened.model, opened.tokenizer, prompts, new_tokens=NEW_TOKENS
                )
        written[name] = generate(opened.model, opened.tokenizer, prompts, new_tokens=NEW_TOKENS)
    return [
        {"prompt": prompt} | {name: texts[i] for name, texts in written.items()}
        for i, prompt in enumerate(prompts)
    ]


def main() -> None:
    """Draw, read back, open and ask."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("small", type=Path)
    parser.add_argument("--lora", type=Path, required=True)
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--held", type=Path, required=True, help="texts with prompts")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--picture", type=Path, default=IMAGES / "qr-code.png")
    parser.add_argument("--out", type=Path, default=RESULTS / "qr_code.json")
    arguments = parser.parse_args()
    payload = packed(arguments.small)
    if len(payload) > LARGEST:
        raise SystemExit(f"{len(payload):,} bytes; a code holds {LARGEST:,} at most")
    designator = draw(payload, arguments.picture)
    back = read(arguments.picture)
    assert back == payload, "what was read from the picture is not what was drawn"
    with arguments.held.open(encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines][: arguments.prompts]
    with tempfile.TemporaryDirectory() as folder:
        opened = unpacked(back, Path(folder) / "opened")
        rows = answers(arguments.base, {"the LoRA": arguments.lora, "the code": opened}, prompts)
    result: dict[str, Any] = {
        "code": designator,
        "bytes_in_the_code": len(payload),
        "bytes": {name: (arguments.small / name).stat().st_size for name in FILES},
        "bytes_of_lora": sum((arguments.lora / name).stat().st_size for name in FILES),
        "sha256": sha256(payload).hexdigest(),
        "rows": rows,
    }
    records.save(arguments.out, result, "torch", "transformers", "peft", "segno", seed=None)
    print(json.dumps(result, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
