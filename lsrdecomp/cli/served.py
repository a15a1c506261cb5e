"""What a server makes of an adapter: by its rules, or by asking it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from shlex import quote

import typer

from lsrdecomp import serving
from lsrdecomp.checkpoints.files import read_text_lines
from lsrdecomp.cli import tables
from lsrdecomp.errors import LsrError

NAMED = 8
"""Names of layers shown for each fault; --json has them all."""


def base_files(base: str) -> Path:
    """Where the names of a base are read: the path itself, or the file that a package brings for a short name."""
    from lsrdecomp.calibration import bases

    return bases.packaged_file() if base == bases.SMOLLM2 and not Path(base).exists() else Path(base)


def by_rules(adapter: Path, server: str, base: str | None, json: Path | None) -> None:
    """`serving.check_served` in words; exit code 1 if no layer would apply."""
    if base is None:
        raise LsrError("--for compares names and sizes with a base's: name it by --base")
    found = serving.check_served(adapter, server, base_files(base))
    tables.show(json, *_sentences(found))
    if json is not None:
        tables.write_json(found.to_json(), json)
    if not found.applied:
        raise typer.Exit(1)


def _sentences(found: serving.ServingCheck) -> Iterator[str]:
    count, rank = len(found.applied), max((module.rank for module in found.applied), default=0)
    size = f", the largest rank {rank}" if count else ""
    yield f"{found.server} on {found.base}: {count} of {len(found.modules)} layers would apply{size}."
    for reason in found.refusals:
        yield f"The file would be refused as a whole: {reason}."
    groups: dict[str, list[str]] = defaultdict(list)
    for module in found.ignored:
        groups[str(module.fault)].append(module.name)
    for fault, names in groups.items():
        more = f" and {len(names) - NAMED} more (--json names all)" if len(names) > NAMED else ""
        yield f"{len(names)} would not, {fault}: {', '.join(names[:NAMED])}{more}."
    if found.rescaled:
        factors = sorted({round(module.factor, 4) for module in found.rescaled})
        spread = f"{factors[0]:g}" if len(factors) == 1 else f"{factors[0]:g} to {factors[-1]:g}"
        place = quote(str(found.adapter))
        baked = f"`lsrdecomp export {place} --profile server --out {place}-server` bakes it into B"
        yield f"{len(found.rescaled)} would act at {spread} times their own scale: {baked}."
    for note in found.notes:
        yield f"Note: {note}."
    yield f"Rules read in {found.rules}; the server itself was not run."


def by_asking(
    adapter: Path, url: str, name: str | None, base: str | None, prompts: Path | None, dtype: str, json: Path | None
) -> None:
    """`serving.ask_server` in words; exit code 1 if the adapter does not act, or acts at another scale."""
    lines = {} if prompts is None else {"prompts": read_text_lines(prompts)}
    with nullcontext() if base is None else tables.quiet():  # what it quiets takes seconds to load
        found = serving.ask_server(url, adapter, name=name, base=base, dtype=dtype, **lines)
    tables.show(json, *_answers(found, url))
    if json is not None:
        tables.write_json(found.to_json(), json)
    if not found.acts or found.scaled_right is False:
        raise typer.Exit(1)


def _answers(found: serving.Asked, url: str) -> Iterator[str]:
    verdict = "acts" if found.acts else "does NOT act"
    yield (
        f"{found.server} at {url}: {found.adapter} {verdict}. It changes log-probabilities by {found.effect:.3g} nats "
        f"on {found.prompts} prompts; two equal requests differ by {found.noise:.3g}."
    )
    if found.set_scale is not None:
        off = "; it was asked for at 1" if found.set_scale == 0.0 else ""
        yield f"The server's own setting is scale {found.set_scale:g}{off}."
    if found.fitted_scale is not None:
        wrong = "" if found.scaled_right else f", NOT the {found.wanted_scale:g} that was asked for"
        yield (
            f"PEFT is nearest at scale {found.fitted_scale:.3g}{wrong}: {found.fit:.3g} nats from the server there, "
            f"{found.misfit:.3g} without the adapter."
        )
