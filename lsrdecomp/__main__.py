"""Start of the command `lsrdecomp` and of ``python -m lsrdecomp``.

Nothing of the package is imported before Ctrl-C is handled.
"""

import sys


def run() -> None:
    """Run the command line; Ctrl-C while its modules are imported is one line, not a traceback."""
    try:
        from lsrdecomp.cli.main import run as run_command

        run_command()
    except KeyboardInterrupt:
        sys.stderr.write("lsrdecomp: stopped\n")
        sys.exit(130)  # as shells give it: 128 and the number of the signal


if __name__ == "__main__":
    run()
