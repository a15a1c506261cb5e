"""The tests of the laboratory see the helpers of the package's own tests, and run as those do."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / room) for room in ("", "lora/peft", "cli"))]

os.environ["HF_HUB_OFFLINE"] = "1"  # before the first import of the hub: no test needs a network
os.environ.setdefault("LSRDECOMP_CACHE", str(ROOT / ".pytest_cache" / "lsrdecomp"))
