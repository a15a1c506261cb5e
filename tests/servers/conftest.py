"""The table that ``make servers`` ends with: what ran of each server, and how near it came."""

from __future__ import annotations

from collections import defaultdict

import pytest

ROWS: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))


@pytest.fixture
def record():
    """Note a figure of a server: ``record(server, what ran, column, value)``."""

    def note(server: str, ran: str, column: str, value: float = 0.0) -> None:
        ROWS[server, ran][column].append(value)

    return note


def pytest_terminal_summary(terminalreporter) -> None:
    if not ROWS:
        return
    terminalreporter.section("servers")
    head = ("server", "ran", "verdicts as the loader", "exports read right", "largest error")
    terminalreporter.write_line("{:16} {:34} {:>22} {:>18} {:>14}".format(*head))
    for (server, ran), columns in ROWS.items():
        errors = columns["exports"] + columns["error"]
        error = f"{max(errors):.1e}" if errors else ""
        counts = [len(columns[name]) or "" for name in ("verdicts", "exports")]
        line = "{:16} {:34} {:>22} {:>18} {:>14}".format(server, ran, *counts, error)
        terminalreporter.write_line(line)
