"""Where the console command starts: outside the package, so that Ctrl-C while that is imported is no traceback."""

import sys


def run() -> None:
    """`lsrdecomp.cli.main.run`; exit code 130 if Ctrl-C comes before it has begun."""
    try:
        from lsrdecomp.cli.main import run as command

        command()
    except KeyboardInterrupt:
        print("lsrdecomp: stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    run()
