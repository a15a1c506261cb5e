"""The outcomes of a run as a table by rooms, and the faults that nothing noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from mutation.faults import Fault
from mutation.trial import Outcome


def table(faults: Sequence[Fault], outcomes: Mapping[str, Outcome]) -> str:
    """Return a row for each room and the faults that were not noticed, as text.

    The column "by its own" counts those that a test of the fault's own room noticed.
    """
    rows: dict[str, Counter[str]] = {}
    for fault in faults:
        outcome = outcomes[fault.name]
        counts = [outcome.status, "own"] if outcome.in_its_room else [outcome.status]
        for room in (fault.room, "all"):
            rows.setdefault(room, Counter()).update(counts)
    width = max(map(len, rows))
    lines = [f"{'room':{width}}  faults  noticed  by its own  survived  unreached    %"]
    for room in [*sorted(rows.keys() - {"all"}), "all"]:
        row = rows[room]
        total = row.total() - row["own"]
        missed = row["survived"] + row["undecided"]
        share = 100 * row["killed"] / total
        lines.append(
            f"{room:{width}}  {total:6}  {row['killed']:7}  {row['own']:10}"
            f"  {missed:8}  {row['unreached']:9}  {share:3.0f}"
        )
    missed_faults = [fault for fault in faults if outcomes[fault.name].status != "killed"]
    if missed_faults:
        lines += ["", "Not noticed; one that changes nothing that anybody can see counts here too:"]
    for fault in missed_faults:
        outcome = outcomes[fault.name]
        asked = f"{outcome.n_asked} tests"
        if outcome.status == "unreached":
            asked = "no test comes by"
        elif outcome.status == "undecided":
            asked = "ended at their limit, and without the fault too"
        asked += f", {outcome.n_left_out} slow ones left out" if outcome.n_left_out else ""
        lines.append(f"  {fault}  ({asked})")
    return "\n".join(lines)
