"""The QR code of the gallery: read back from the picture on the page, and opened."""

import json
import random
from hashlib import sha256
from pathlib import Path

import pytest

from benchmarks.language import qr_code
from lsrdecomp.lora.files import open_checkpoint

ROOT = Path(__file__).resolve().parents[2]
RECORD = json.loads((ROOT / "benchmarks" / "results" / "qr_code.json").read_text(encoding="utf-8"))
PAGE = ROOT / "docs" / "gallery" / "qr-code.md"
PICTURE = ROOT / "docs" / "images" / "qr-code.png"


def reader():
    pytest.importorskip("zxingcpp", reason="reads QR codes: pip install zxing-cpp")
    pytest.importorskip("PIL", reason="opens pictures")


def test_the_picture_on_the_page_is_the_adapter_of_the_record(tmp_path):
    reader()
    payload = qr_code.read(PICTURE)
    assert len(payload) == RECORD["bytes_in_the_code"] <= qr_code.LARGEST
    assert sha256(payload).hexdigest() == RECORD["sha256"]
    opened = open_checkpoint(qr_code.unpacked(payload, tmp_path / "opened"))
    assert opened.format == "lsr"
    assert opened.adapter_parameters > 1000
    assert all(layer.load() for layer in opened.layers)


def test_what_is_drawn_is_what_is_read(tmp_path):
    reader()
    pytest.importorskip("segno", reason="draws QR codes: pip install segno")
    payload = random.Random(0).randbytes(700)
    qr_code.draw(payload, tmp_path / "code.png")
    assert qr_code.read(tmp_path / "code.png") == payload


def test_the_page_shows_what_the_record_says():
    words = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"{RECORD['bytes_in_the_code']:,} bytes" in words
    for row in RECORD["rows"]:
        for name in ("the base", "the LoRA", "the code"):
            assert " ".join(row[name].split()) in words
    assert f"{RECORD['bytes_of_lora'] / 1e6:.1f} MB" in words
