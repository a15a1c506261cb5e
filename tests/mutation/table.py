"""The outcomes of a run as a table by rooms, and the faults that nothing noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from mutation.faults import Fault
from mutation.trial import Outcome


def table(faults: Sequence[Fault], outcomes: Mapping[str, Outcome]) -> str:
    """Return a row for each room and the faults that were not noticed, as text."""
    rows: dict[str, Counter[str]] = {}
    for fault in faults:
        status = outcomes[fault.name].status
        rows.setdefault(fault.room, Counter())[status] += 1
        rows.setdefault("all", Counter())[status] += 1
    width = max(map(len, rows))
    lines = [f"{'room':{width}}  faults  noticed  survived  unreached    %"]
    for room in [*sorted(rows.keys() - {"all"}), "all"]:
        row = rows[room]
        share = 100 * row["killed"] / row.total()
        lines.append(
            f"{room:{width}}  {row.total():6}  {row['killed']:7}  {row['survived']:8}"
            f"  {row['unreached']:9}  {share:3.0f}"
        )
    missed = [fault for fault in faults if outcomes[fault.name].status != "killed"]
    if missed:
        lines += ["", "Not noticed; one that changes nothing that anybody can see counts here too:"]
    for fault in missed:
        outcome = outcomes[fault.name]
        asked = f"{outcome.n_asked} tests" if outcome.status == "survived" else "no test comes by"
        asked += f", {outcome.n_left_out} slow ones left out" if outcome.n_left_out else ""
        lines.append(f"  {fault}  ({asked})")
    return "\n".join(lines)
