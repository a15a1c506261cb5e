"""The verb that measures how much of a LoRA is left in what somebody made of it."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsrdecomp import lora
from lsrdecomp.cli import tables
from lsrdecomp.cli.layer_tables import difference_table
from lsrdecomp.cli.options import ForceFile, JsonFile
from lsrdecomp.cli.outputs import NEW_FILE, Input
from lsrdecomp.cli.progress_bars import follow
from lsrdecomp.cli.requests import Display
from lsrdecomp.cli.setting_options import option_groups, options_of
from lsrdecomp.errors import LsrError
from lsrdecomp.lora.search.measured_settings import EvaluatorSettings

if TYPE_CHECKING:
    from lsrdecomp.lora.measure import Comparison, Reason

SETTINGS = (
    "batch",
    "max_length",
    "truncate",
    "dtype",
    "device",
    "seed",
    "trust_remote_code",
)
"""Fields of `EvaluatorSettings` that are options."""


@options_of(EvaluatorSettings, only=SETTINGS)
@option_groups
def measure(
    source: Annotated[
        Path, typer.Argument(metavar="LORA", help="The LoRA as it was trained.", show_default=False)
    ],
    other: Annotated[
        str,
        Input,
        typer.Argument(
            help="What became of it: an adapter, a model that it was merged into (a directory or "
            "a GGUF file, quantized or not), or http://… of a running server.",
            show_default=False,
        ),
    ],
    *,
    base: Annotated[
        str | None,
        Input,
        typer.Option(help="The base model: outputs are compared on it. Merged models need it."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Texts to compare outputs on, one a line, or JSON lines with prompt and "
            "completion; without, the model writes its own."
        ),
    ] = None,
    fail_below: Annotated[
        float | None,
        typer.Option(
            "--fail-below",
            help="Exit code 1 if a smaller share of the effect is left, such as 0.95.",
            min=0.0,
            max=1.0,
        ),
    ] = None,
    served_as: Annotated[
        str | None,
        typer.Option("--served-as", help="The adapter's name or number in a server."),
    ] = None,
    sarif: Annotated[
        Path | None,
        NEW_FILE,
        typer.Option("--sarif", help="Also write the reasons as SARIF, which CI systems show."),
    ] = None,
    display: Display,
    json: JsonFile = None,
    force: ForceFile = False,
    **options: Any,
) -> None:
    """Measure how much of a LoRA is left in what somebody made of it.

    Weights are compared layer by layer, where there are any; with --base outputs are, too. The
    verdict comes first, then reasons. Exit code 1 if it is damaged or gone, or if less is left than
    --fail-below.
    """
    del force  # `outputs.checked` reads it
    if fail_below is not None and base is None:
        raise LsrError("--fail-below is about outputs: give --base")
    with follow(quiet=display.quiet) as step, nullcontext() if base is None else tables.quiet():
        found = lora.measure.measure(
            source, other, base=base, data=data, served_as=served_as, on_step=step, **options
        )
    tables.show(json, *_lines(found))
    if found.layers and (display.each or found.verdict != "whole"):
        tables.show(json, difference_table(found.layers, each=display.each), wide=display.wide)
    figures = {**found.to_json(), "fail_below": fail_below, "passed": found.passed(fail_below)}
    tables.write_json(figures, json)
    if sarif is not None:
        text = json_module.dumps(_sarif_report(found, fail_below), indent=2) + "\n"
        with tables.files({sarif: text}):
            pass
    if not found.passed(fail_below):
        if fail_below is not None and found.verdict not in ("damaged", "gone"):
            tables.say(f"less than {100 * fail_below:g} % of the LoRA's effect is left")
        raise typer.Exit(1)


def _lines(found: Comparison) -> Iterator[str]:
    """Yield verdict, reasons and coverage."""
    yield found.sentence()
    for reason in found.reasons:
        yield f"- {reason}"
    if found.fidelity is not None and found.fidelity.is_far:
        yield (
            f"- far: {found.fidelity.kl:.2g} nats per token, above {found.fidelity.far_above:g}, "
            "where most whole answers differ"
        )
    if found.server is not None:
        yield from _server_sentences(found.server, found.other)
    if found.layers or found.not_compared:
        yield f"{found.coverage}."


def _server_sentences(reply: lora.measure.ServerMeasurement, url: str) -> Iterator[str]:
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


SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def _sarif_report(found: Comparison, fail_below: float | None = None) -> dict[str, Any]:
    """Return a comparison in the static analysis results interchange format, SARIF 2.1.0.

    Faults are errors, other reasons notes; a share below the one that was asked for is an error.
    """
    from lsrdecomp.lora.measure.symptoms import FAULTS, OTHERS

    described = {**FAULTS, **OTHERS, "share": "share of the LoRA's effect that is left"}
    results = [
        _sarif_result(found, reason, "error" if reason.is_fault else "note")
        for reason in found.reasons
    ]
    level = "note" if found.passed(fail_below) else "error"
    results.append(_sarif_result(found, lora.measure.Reason("share", found.sentence()), level))
    used = sorted({result["ruleId"] for result in results})
    rules = [{"id": code, "shortDescription": {"text": described[code]}} for code in used]
    driver = {"name": "lsrdecomp measure", "rules": rules}
    run = {"tool": {"driver": driver}, "results": results}
    return {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}


def _sarif_result(found: Comparison, reason: Reason, level: str) -> dict[str, Any]:
    """Return one result: what was found, in which file and layers."""
    place: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": found.other}}}
    if reason.layers:
        place["logicalLocations"] = [{"fullyQualifiedName": name} for name in reason.layers]
    return {
        "ruleId": reason.code,
        "level": level,
        "message": {"text": reason.sentence},
        "locations": [place],
    }
