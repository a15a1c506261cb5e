"""An animated picture of a terminal: the demo's adapter compressed, as it was typed and printed in a real run.

python -m benchmarks.lab.terminal_cast docs/images/compress.svg

Each line appears when the run printed it, pauses cut to a second. One SVG file with its style inside: no script, no
font from elsewhere, and still where a reader asks for less motion.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from html import escape
from importlib.resources import as_file, files
from pathlib import Path

WIDTH = 100
COMMAND = "lsrdecomp compress adapter --ratio 48 --calibrated statistics --storage float16 --out adapter-lsr"
LONGEST_PAUSE = 1.0
LINE, CHARACTER, MARGIN = 19.0, 8.0, 16.0
STYLE = """
rect { fill: #16181d }
text { font: 13.3px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #d7dae0; white-space: pre }
.typed { fill: #8fd18f }
.late { opacity: 0; animation: appear .01s forwards }
@keyframes appear { to { opacity: 1 } }
@media (prefers-reduced-motion: reduce) { .late { opacity: 1; animation: none } }
"""


def main(out: Path) -> None:
    with (
        as_file(files("lsrdecomp.cli") / "demo_adapter") as adapter,
        as_file(files("lsrdecomp.cli") / "demo_statistics") as statistics,
        tempfile.TemporaryDirectory() as place,
    ):
        (Path(place) / "adapter").symlink_to(adapter)
        (Path(place) / "statistics").symlink_to(statistics)
        lines = recorded(COMMAND.split()[1:], place)
    out.write_text(drawn(COMMAND, lines), encoding="utf-8")


def recorded(arguments: list[str], place: str) -> list[tuple[float, str]]:
    """Lines of standard output, each with the seconds since the one before, pauses cut short."""
    environment = {**os.environ, "COLUMNS": str(WIDTH), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lsrdecomp.cli.main", *arguments]
    found, last = [], time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=place, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            now = time.monotonic()
            found.append((min(now - last, LONGEST_PAUSE), line.rstrip("\n")))
            last = now
    if process.returncode:
        raise SystemExit(f"{COMMAND} ended with {process.returncode}")
    return found


def drawn(command: str, lines: list[tuple[float, str]]) -> str:
    """The picture: the command letter by letter in a second and a half, then the lines at their times."""
    folded = []
    for pause, line in lines:
        first, *rest = textwrap.wrap(line, WIDTH) if len(line) > WIDTH else [line]
        folded += [(pause, first), *((0.0, piece) for piece in rest)]
    width, height = 2 * MARGIN + CHARACTER * WIDTH, 2 * MARGIN + LINE * (len(folded) + 1)
    step = 1.5 / len(command)
    letters = "".join(
        f'<tspan class="typed late" style="animation-delay:{0.4 + step * k:.2f}s">{escape(letter)}</tspan>'
        for k, letter in enumerate(command)
    )
    rows, clock = [f'<text x="{MARGIN}" y="{MARGIN + 12}">$ {letters}</text>'], 2.2
    for place, (pause, text) in enumerate(folded):
        clock += pause + 0.04
        style, y = f"animation-delay:{clock:.2f}s", MARGIN + 12 + LINE * (place + 1)
        rows.append(f'<text class="late" style="{style}" x="{MARGIN}" y="{y:.0f}">{escape(text)}</text>')
    box = f'viewBox="0 0 {width:.0f} {height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-label="{escape(command)}">'
        f"<style>{STYLE}</style><rect width='100%' height='100%' rx='8'/>{''.join(rows)}</svg>\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
