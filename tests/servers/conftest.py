"""The table that ``make servers`` ends with: what ran of each server, and how near it came."""

from __future__ import annotations

from collections import defaultdict

import pytest

LINE = "{:24} {:34} {:>18} {:>14}"
ROWS: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))


@pytest.fixture
def record():
    """Note a figure of a server: ``record(server, what ran, column, value)``."""

    def note(server: str, ran: str, column: str, value: float = 0.0) -> None:
        ROWS[server, ran][column].append(value)

    return note


def pytest_terminal_summary(terminalreporter) -> None:
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", [])
        if report.nodeid.startswith("tests/servers")
    ]
    reasons = sorted({report.longrepr[2].removeprefix("Skipped: ") for report in skipped})
    if not ROWS and not reasons:
        return
    terminalreporter.section("servers")
    head = ("server", "ran", "exports read right", "largest error")
    terminalreporter.write_line(LINE.format(*head))
    for (server, ran), columns in ROWS.items():
        errors = columns["exports"] + columns["error"]
        error = f"{max(errors):.1e}" if errors else ""
        count = len(columns["exports"]) or ""
        terminalreporter.write_line(LINE.format(server, ran, count, error))
    for reason in reasons:
        terminalreporter.write_line(f"not run: {reason}")
