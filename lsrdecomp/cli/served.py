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

    return (
        bases.packaged_file() if base == bases.SMOLLM2 and not Path(base).exists() else Path(base)
    )


def by_rules(adapter: Path, server: str, base: str | None, json: Path | None) -> None:
    """`serving.check_served` in words; exit code 1 if no layer would apply."""
    if base is None:
        raise LsrError("--for compares names and sizes with a base's: name it by --base")
    check = serving.check_served(adapter, server, base_files(base))
    tables.show(json, *_sentences(check))
    tables.write_json(check.to_json(), json)
    if not check.applied:
        raise typer.Exit(1)


def _sentences(check: serving.ServingCheck) -> Iterator[str]:
    count, rank = len(check.applied), max((module.rank for module in check.applied), default=0)
    size = f", the largest rank {rank}" if count else ""
    yield f"{check.server} on {check.base}: {count} of {len(check.modules)} layers would apply{size}."
    for reason in check.refusals:
        yield f"The file would be refused as a whole: {reason}."
    groups: dict[str, list[str]] = defaultdict(list)
    for module in check.ignored:
        groups[str(module.fault)].append(module.name)
    for fault, names in groups.items():
        more = f" and {len(names) - NAMED} more (--json names all)" if len(names) > NAMED else ""
        yield f"{len(names)} would not, {fault}: {', '.join(names[:NAMED])}{more}."
    if check.rescaled:
        factors = sorted({round(module.factor, 4) for module in check.rescaled})
        spread = f"{factors[0]:g}" if len(factors) == 1 else f"{factors[0]:g} to {factors[-1]:g}"
        path = quote(str(check.adapter))
        baked = f"`lsrdecomp export {path} --profile server --out {path}-server` bakes it into B"
        yield f"{len(check.rescaled)} would act at {spread} times their own scale: {baked}."
    for note in check.notes:
        yield f"Note: {note}."
    yield f"Rules read in {check.rules}; the server itself was not run."


def by_asking(
    adapter: Path,
    url: str,
    name: str | None,
    base: str | None,
    prompts: Path | None,
    dtype: str,
    json: Path | None,
) -> None:
    """`serving.ask_server` in words; exit code 1 if the adapter does not act, or acts at another scale."""
    lines = {} if prompts is None else {"prompts": read_text_lines(prompts)}
    with nullcontext() if base is None else tables.quiet():  # what it quiets takes seconds to load
        reply = serving.ask_server(url, adapter, name=name, base=base, dtype=dtype, **lines)
    tables.show(json, *_answers(reply, url))
    tables.write_json(reply.to_json(), json)
    if not reply.acts or reply.scaled_right is False:
        raise typer.Exit(1)


def _answers(reply: serving.Asked, url: str) -> Iterator[str]:
    verdict = "acts" if reply.acts else "does NOT act"
    yield (
        f"{reply.server} at {url}: {reply.adapter} {verdict}. It changes log-probabilities by {reply.effect:.3g} nats "
        f"on {reply.prompts} prompts; two equal requests differ by {reply.noise:.3g}."
    )
    if reply.set_scale is not None:
        off = "; it was asked for at 1" if reply.set_scale == 0.0 else ""
        yield f"The server's own setting is scale {reply.set_scale:g}{off}."
    if reply.fitted_scale is not None:
        wrong = "" if reply.scaled_right else f", NOT the {reply.wanted_scale:g} that was asked for"
        yield (
            f"PEFT is nearest at scale {reply.fitted_scale:.3g}{wrong}: {reply.fit:.3g} nats from the server there, "
            f"{reply.misfit:.3g} without the adapter."
        )
