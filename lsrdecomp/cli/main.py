"""The start of the console command, where errors become a line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from io import TextIOWrapper

from lsrdecomp.errors import LsrError

STOPPED = 130
"""Exit code after Ctrl-C, as shells give it: 128 and the number of the signal."""


def run() -> None:
    """Run a command and exit.

    Exit codes: 0 done, 1 a budget was missed or a check failed, 2 unusable input, 130 stopped by
    Ctrl-C.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        # "⊗" is not in every encoding, such as that of a pipe on Windows.
        sys.stdout.reconfigure(errors="replace")
    try:
        # A second or two, in which Ctrl-C is no traceback either.
        from lsrdecomp.cli.app import app

        app(prog_name="lsrdecomp")
    except (LsrError, OSError) as error:
        from lsrdecomp.cli.help import flags
        from lsrdecomp.gateway import printable

        message = ". ".join([str(error), *_notes(error)])
        line = flags(" ".join(message.split()))
        print(f"lsrdecomp: {printable(line) or type(error).__name__}", file=sys.stderr)
        sys.exit(2)
    except MemoryError:
        print("lsrdecomp: not enough memory for a layer of this size", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, SystemExit) as end:
        # typer's answer to Ctrl-C is that code without a word.
        if isinstance(end, SystemExit) and end.code != STOPPED:
            raise
        message = ". ".join(["stopped; what was not finished was not written", *_notes(end)])
        print(f"lsrdecomp: {message}", file=sys.stderr)
        sys.exit(STOPPED)


def _notes(error: BaseException | None) -> Iterator[str]:
    """Yield what was noted on an error, or on the one that it came of: where a journal waits."""
    while error is not None:
        yield from getattr(error, "__notes__", ())
        error = error.__context__


if __name__ == "__main__":
    run()
