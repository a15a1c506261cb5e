"""What a server's rules or loader make of an adapter, in words and by exit code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import typer

from lsrdecomp import serving
from lsrdecomp.cli import served
from lsrdecomp.errors import LsrError
from lsrdecomp.serving.report import ModuleFate, ServingCheck

CHECK = ServingCheck(
    "vllm",
    "the rules of vLLM",
    Path("my loras/small"),
    Path("base"),
    [ModuleFate(f"{i}.q_proj", rank=8 * i + 8) for i in range(3)],
)


def told(
    check: ServingCheck, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[str]]:
    """Return the exit code and the lines of a check."""
    monkeypatch.setattr(serving, "check_served", lambda *_, **__: check)
    code = 0
    try:
        served.by_loader(check.adapter, "vllm", "base", None)
    except typer.Exit as end:
        code = end.exit_code
    text = " ".join(capsys.readouterr().out.split())
    return code, text.replace("; the server itself was not run.", "").split(". ")


def test_where_all_would_apply_it_says_how_many_and_the_largest_rank(monkeypatch, capsys):
    code, lines = told(CHECK, monkeypatch, capsys)
    assert code == 0
    assert lines == [
        "vllm on base: 3 of 3 layers would apply, the largest rank 24",
        "The rules of vLLM",
    ]


def test_what_is_refused_as_a_whole_applies_nowhere_and_is_exit_code_1(monkeypatch, capsys):
    refused = replace(CHECK, refusals=["too large"], loader_version="9.9")
    code, lines = told(refused, monkeypatch, capsys)
    assert code == 1
    assert lines[:2] == [
        "vllm on base: 0 of 3 layers would apply",
        "The file would be refused as a whole: too large",
    ]
    assert not any("compared" in line for line in lines)


def test_what_is_not_known_is_exit_code_3(monkeypatch, capsys):
    assert told(replace(CHECK, is_certain=False), monkeypatch, capsys)[0] == 3


@pytest.mark.parametrize(("count", "more"), [(8, ""), (9, " and 1 more (--json names all)")])
def test_layers_left_out_are_named_eight_at_most_for_each_fault(count, more, monkeypatch, capsys):
    odd = [ModuleFate(f"m{i}", rank=4, fault="no such module") for i in range(count)]
    check = replace(CHECK, modules=[*CHECK.modules, *odd, ModuleFate("head", 4, fault="a head")])
    code, lines = told(check, monkeypatch, capsys)
    assert code == 0
    assert lines[0] == f"vllm on base: 3 of {count + 4} layers would apply, the largest rank 24"
    names = ", ".join(f"m{i}" for i in range(8))
    assert lines[1] == f"{count} would not, no such module: {names}{more}"
    assert lines[2] == "1 would not, a head: head"


@pytest.mark.parametrize(
    ("factors", "spread"),
    [
        ((0.5, 0.5, 1.0), "2 would act at 0.5"),
        ((4, 1, 0.25), "2 would act at 0.25 to 4"),
        ((4, 0.25, 2), "3 would act at 0.25 to 4"),
    ],
)
def test_another_scale_is_told_with_a_command_that_can_be_typed(
    factors, spread, monkeypatch, capsys
):
    modules = [replace(m, factor=f) for m, f in zip(CHECK.modules, factors, strict=True)]
    _, lines = told(replace(CHECK, modules=modules), monkeypatch, capsys)
    command = "`lsrdecomp export 'my loras/small' --out 'my loras/small'-served`"
    assert lines[1] == f"{spread} times their own scale: {command} bakes it into B"


def test_the_largest_error_of_a_loader_is_told(monkeypatch, capsys):
    errors = (1e-7, 3e-4, None)
    modules = [replace(m, error=e) for m, e in zip(CHECK.modules, errors, strict=True)]
    check = replace(CHECK, modules=modules, loader_version="9.9", notes=["see there"])
    _, lines = told(check, monkeypatch, capsys)
    assert lines[1] == "Note: see there"
    assert lines[2].endswith("compared: relative error at most 3.0e-04")


def test_a_base_is_needed():
    with pytest.raises(LsrError, match="name it by --base"):
        served.by_loader(Path("small"), "vllm", None, None)
