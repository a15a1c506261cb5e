"""What was measured, and how: a folder for each question; README.md lists them."""

from pathlib import Path

RESULTS = Path(__file__).parent / "results"
"""Where the records are that the pages show."""
