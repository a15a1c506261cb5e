"""The outcomes of a run as a table by rooms, and the faults that nothing noticed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutation.faults import Fault
from mutation.trial import Outcome

EQUIVALENT = Path(__file__).with_name("equivalent.txt")
"""Faults that change nothing that anybody can see: file, line of source, change, reason."""


def equivalent(faults: Sequence[Fault], root: Path, listed: Path = EQUIVALENT) -> set[str]:
    """Return the names of those faults that are listed as changing nothing that can be seen.

    They are known by the text of their line, which may move.
    """
    known = set()
    for line in listed.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            path, source, change, _reason = line.split(" | ")
            known.add((path, source, change))
    found = set()
    for fault in faults:
        lines = (root / fault.path).read_text(encoding="utf-8").splitlines()
        if (fault.path, lines[fault.line - 1].strip(), fault.change) in known:
            found.add(fault.name)
    return found


@dataclass(slots=True)
class Row:
    """What became of the faults of a room.

    Attributes
    ----------
    room : str
    faults, noticed, by_its_own : int
        All; those that a test noticed; those that a test of the room noticed.
    survived, unreached : int
        Those that tests came by and did not notice, and those that none came by.
    equivalent : int
        Those that were not noticed and change nothing that anybody can see.
    """

    room: str
    faults: int = 0
    noticed: int = 0
    by_its_own: int = 0
    survived: int = 0
    unreached: int = 0
    equivalent: int = 0

    @property
    def percent(self) -> float:
        """The share that was noticed of those that somebody can see."""
        visible = self.faults - self.equivalent
        return 100.0 * self.noticed / visible if visible else 100.0

    def add(self, outcome: Outcome, *, is_equivalent: bool) -> None:
        """Count the outcome of one more fault."""
        self.faults += 1
        self.by_its_own += outcome.in_its_room
        if outcome.status == "killed":
            self.noticed += 1
        elif is_equivalent:
            self.equivalent += 1
        elif outcome.status == "unreached":
            self.unreached += 1
        else:
            self.survived += 1


def rows_by_room(
    faults: Sequence[Fault], outcomes: Mapping[str, Outcome], unseen: Collection[str] = ()
) -> list[Row]:
    """Return a row for each room, and one for all at the end; ``unseen`` names equivalents."""
    rows = {room: Row(room) for room in sorted({fault.room for fault in faults})}
    rows["all"] = Row("all")
    for fault in faults:
        for room in (fault.room, "all"):
            rows[room].add(outcomes[fault.name], is_equivalent=fault.name in unseen)
    return list(rows.values())


def table(
    faults: Sequence[Fault], outcomes: Mapping[str, Outcome], unseen: Collection[str] = ()
) -> str:
    """Return a row for each room and the faults that were not noticed, as text.

    The column "by its own" counts those that a test of the fault's own room noticed; the
    percentage is without those that are equivalent.
    """
    rows = rows_by_room(faults, outcomes, unseen)
    width = max(len(row.room) for row in rows)
    head = "faults  noticed  by its own  survived  unreached  equivalent    %"
    lines = [f"{'room':{width}}  {head}"]
    lines += [
        f"{row.room:{width}}  {row.faults:6}  {row.noticed:7}  {row.by_its_own:10}"
        f"  {row.survived:8}  {row.unreached:9}  {row.equivalent:10}  {row.percent:3.0f}"
        for row in rows
    ]
    missed = [fault for fault in faults if outcomes[fault.name].status != "killed"]
    left = [fault for fault in missed if fault.name not in unseen]
    if left:
        lines += ["", "Not noticed:", *(f"  {fault_line(fault, outcomes)}" for fault in left)]
    return "\n".join(lines)


def fault_line(fault: Fault, outcomes: Mapping[str, Outcome]) -> str:
    """Return a fault that was not noticed, and which tests were asked."""
    outcome = outcomes[fault.name]
    asked = f"{outcome.n_asked} tests"
    if outcome.status == "unreached":
        asked = "no test comes by"
    elif outcome.status == "undecided":
        asked = "ended at their limit, and without the fault too"
    asked += f", {outcome.n_left_out} slow ones left out" if outcome.n_left_out else ""
    return f"{fault}  ({asked})"
