"""``python -m lsrdecomp`` is the command `lsrdecomp`."""

from lsrdecomp.cli.main import run

if __name__ == "__main__":
    run()
