"""The command line of the laboratory."""

from benchmarks.lab.app import run

run()
