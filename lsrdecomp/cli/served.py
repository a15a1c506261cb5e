"""What a server makes of an adapter: by its loader or rules, or by asking it."""

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
from lsrdecomp.cli.program import program
from lsrdecomp.errors import LsrError


def base_path(base: str) -> Path:
    """Return where names of a base are read: its path, or the file packaged for a short name."""
    from lsrdecomp.calibration import base_files

    path = Path(base)
    if base == base_files.SMOLLM2 and not path.exists():
        return base_files.packaged_file()
    if base_files.is_minilm(base) and not path.exists():
        return base_files.packaged_minilm() or path
    return path


def by_loader(
    adapter: Path,
    server: str,
    base: str | None,
    json: Path | None,
    python: str | None = None,
) -> None:
    """Show `serving.check_served` in words.

    Exit code 1 if no layer would apply; 3 if that is not known.
    """
    if base is None:
        raise LsrError("--for compares names and sizes with a base's: name it by --base")
    check = serving.check_served(adapter, server, base_path(base), python=python)
    tables.show(json, *_check_sentences(check))
    tables.write_json(check.to_json(), json)
    if not check.applied:
        raise typer.Exit(1)
    if not check.is_certain:
        raise typer.Exit(3)


def _check_sentences(check: serving.ServingCheck, max_names: int = 8) -> Iterator[str]:
    """Yield what would apply and what would not, with a few names for each fault."""
    # 1. What would apply.
    largest = ""
    if check.applied:
        largest = f", the largest rank {max(module.rank for module in check.applied)}"
    applied = f"{len(check.applied)} of {len(check.modules)} layers would apply"
    yield f"{check.server} on {check.base}: {applied}{largest}."
    # 2. What would not, by fault.
    for reason in check.refusals:
        yield f"The file would be refused as a whole: {reason}."
    names_by_fault: dict[str, list[str]] = defaultdict(list)
    for module in check.ignored:
        names_by_fault[str(module.fault)].append(module.name)
    for fault, names in names_by_fault.items():
        text = ", ".join(names[:max_names])
        if len(names) > max_names:
            text += f" and {len(names) - max_names} more (--json names all)"
        yield f"{len(names)} would not, {fault}: {text}."
    # 3. What would act at another scale.
    if check.rescaled:
        yield _rescaled_sentence(check)
    for note in check.notes:
        yield f"Note: {note}."
    if check.loader_version is not None and check.applied:
        error = max(module.error or 0.0 for module in check.applied)
        yield f"ΔW of every layer that applies was compared: relative error at most {error:.1e}."
    yield f"{check.rules[0].upper()}{check.rules[1:]}; the server itself was not run."


def _rescaled_sentence(check: serving.ServingCheck) -> str:
    """Return at which factors layers would act, and the command that mends it."""
    factors = sorted({round(module.factor, 4) for module in check.rescaled})
    spread = f"{factors[0]:g}"
    if len(factors) > 1:
        spread += f" to {factors[-1]:g}"
    path = quote(str(check.adapter))
    command = f"{program()} export {path} --out {path}-served"
    return (
        f"{len(check.rescaled)} would act at {spread} times their own scale: `{command}` bakes it "
        "into B."
    )


def by_asking(
    adapter: Path,
    url: str,
    name: str | None,
    base: str | None,
    prompts: Path | None,
    dtype: str,
    json: Path | None,
) -> None:
    """Show `serving.ask_server` in words; exit code 1 if the adapter does not act as asked."""
    lines = {} if prompts is None else {"prompts": read_text_lines(prompts)}
    with nullcontext() if base is None else tables.quiet():  # what it quiets takes seconds to load
        reply = serving.ask_server(url, adapter, name=name, base=base, dtype=dtype, **lines)
    tables.show(json, *_reply_sentences(reply, url))
    tables.write_json(reply.to_json(), json)
    if not reply.acts or reply.scaled_right is False:
        raise typer.Exit(1)


def _reply_sentences(reply: serving.ServerMeasurement, url: str) -> Iterator[str]:
    """Yield whether the adapter acts, and at which scale."""
    verdict = "acts" if reply.acts else "does NOT act"
    yield (
        f"{reply.server} at {url}: {reply.adapter} {verdict}. It changes log-probabilities by "
        f"{reply.effect:.3g} nats on {reply.prompts} prompts; two equal requests differ by "
        f"{reply.noise:.3g}."
    )
    if reply.set_scale is not None:
        off = "; it was asked for at 1" if reply.set_scale == 0.0 else ""
        yield f"The server's own setting is scale {reply.set_scale:g}{off}."
    if reply.fitted_scale is not None:
        wrong = ""
        if not reply.scaled_right:
            wrong = f", NOT the {reply.requested_scale:g} that was asked for"
        yield (
            f"PEFT is nearest at scale {reply.fitted_scale:.3g}{wrong}: {reply.fit:.3g} nats from "
            f"the server there, {reply.misfit:.3g} without the adapter."
        )
