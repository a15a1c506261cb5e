"""Every setting on every route, from Python and the command line: read, or refused by name."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer
from typer.testing import CliRunner

import lsrdecomp
from lsrdecomp import compress
from lsrdecomp.cli import compress_command as command_module
from lsrdecomp.cli import resize
from lsrdecomp.cli.app import app
from lsrdecomp.cli.requests import OWN_OPTIONS, flag
from lsrdecomp.errors import ArgumentError, BudgetError, LsrError
from lsrdecomp.fields import SettingsError
from lsrdecomp.lora.compress import compress_lora as library_module
from lsrdecomp.lora.compress import truncate
from lsrdecomp.lora.files import Journal, open_checkpoint
from lsrdecomp.lora.search import Search, search_adapter
from lsrdecomp.lora.search.measured_settings import MeasuredSettings
from lsrdecomp.lora.search.plan import GOALS, SHARES_TO_KEEP, CompressionPlan, Resources
from lsrdecomp.lora.search.request import READ_ON, SEARCH_ONLY, Request, Route

if TYPE_CHECKING:
    from collections.abc import Iterable

DEMO = Path(lsrdecomp.__file__).parent / "cli" / "demo_adapter"
DOCS = Path(lsrdecomp.__file__).parent.parent / "docs"

ALL_GOALS = (*GOALS, *SHARES_TO_KEEP)

VALUES: dict[str, Any] = {
    "ratio": 9.0,
    "parameters": 900.0,
    "bytes": 90_000,
    "rtol": 0.5,
    "kl": 0.1,
    "keep": 0.9,
    "keep_answers": 0.9,
    "separation_rank": 3,
    "inner_shape": (2, 2),
    "max_rank": 3,
    "only": ("*query",),
    "min_rank": 1,
    "energy": 0.6,
    "structure": "lsr",
    "storage": "bfloat16",
    "statistics": DEMO.parent / "demo_statistics",
    "search": Search(orders=(2,), rounds=0),
    "workers": 2,
    "journal": Journal("unused"),
    "device": "cpu",
    "base": "other",
    "data": "other.txt",
    "held_out": 9,
    "batch": 9,
    "max_length": 9,
    "truncate": True,
    "trust_remote_code": True,
    "dtype": "bfloat16",
    "seed": 9,
    "distill": 9,
    "examples": 9,
    "passes": 2,
}
"""A value of each setting that no route takes by itself."""

TYPED = {
    "name": "x",
    "alpha": "9",
    "max_memory": "9MB",
    "out": "other",
    "to": "same",
    "report": "report.html",
    "json": "figures.json",
}
"""The same for options of the command line's own; all others are flags."""

ON_ROUTE: dict[Route, dict[str, Any]] = {
    Route.SEARCHED: {"ratio": 8.0},
    Route.GIVEN_TERMS: {"separation_rank": 2},
    Route.MEASURED: {"ratio": 8.0, "base": "base", "data": "texts.txt"},
    Route.TRUNCATED: {"ratio": 8.0},
    Route.TRUNCATED_ON_BASE: {"ratio": 8.0, "base": "base", "data": "texts.txt"},
}
TO_FILE = (Route.TRUNCATED, Route.TRUNCATED_ON_BASE)
"""The least that leads to each route."""


class Arrived(Exception):  # noqa: N818
    """What a route received; it is not travelled further."""


def arrive(*given: Any, **named: Any) -> None:
    raise Arrived(repr((given, named)))


# -- the table and the docs know every setting -----------------------------------------------------


def options_of_the_command() -> set[str]:
    command = typer.main.get_command(app).commands["compress"]  # type: ignore[attr-defined]
    of_every_run = {"adapter", "help_all", "config", "write_config"}
    return {each.name for each in command.params} - of_every_run


def test_every_declared_setting_has_its_routes() -> None:
    others = {"checkpoint", "plan", "settings", "on_step"}
    arguments = set(inspect.signature(compress).parameters) - others
    resources = {each.name for each in dataclasses.fields(Resources)} - {"limits", "on_step"}
    declared = {*CompressionPlan.fields, *MeasuredSettings.fields, *resources, *arguments}
    assert set(READ_ON) == declared
    assert options_of_the_command() - set(READ_ON) == set(OWN_OPTIONS)
    assert set(VALUES) == declared
    assert all(READ_ON.values()), "a setting that no route reads"


def test_the_docs_have_the_same_table() -> None:
    page = (DOCS / "reference" / "compress-settings.md").read_text(encoding="utf-8")
    table = page.partition("| setting |")[2].partition("\n\n")[0].splitlines()
    routes = [Route(cell.strip()) for cell in table[0].strip(" |").split("|")]
    found = {}
    for line in table[2:]:
        settings, *marks = [cell.strip() for cell in line.strip("|").split("|")]
        read_on = {route for route, mark in zip(routes, marks, strict=True) if mark == "yes"}
        for name in re.findall(r"`([^`]+)`", settings):
            assert name not in found
            found[name] = read_on
    of_python = set(READ_ON) - options_of_the_command()
    spelled = {name: f"{name}=" if name in of_python else flag(name) for name in READ_ON}
    wanted = {spelled[name]: set(routes) for name, routes in READ_ON.items()}
    wanted |= {flag(name): set(routes) for name, routes in OWN_OPTIONS.items()}
    assert found == wanted


# -- each setting on each route, from Python -------------------------------------------------------


def received_in_python(route: Route, settings: dict[str, Any], patch: pytest.MonkeyPatch) -> str:
    """What the route is given of a call; it goes no further."""
    patch.setattr(library_module, "search_adapter", arrive)
    patch.setattr(library_module, "_compress_measured", arrive)
    try:
        if route is Route.TRUNCATED:
            return repr(cut_file(settings))
        if route is Route.TRUNCATED_ON_BASE:
            return repr(Request.parse(settings, to_file=True))
        compress(DEMO, **as_typed(settings))
    except Arrived as arrived:
        return str(arrived)
    raise AssertionError("nothing was asked of the route")


def as_typed(settings: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `compress`: those that it has, and one value for the others."""
    known = inspect.signature(compress).parameters
    if "only" in settings:  # which is in plans alone
        in_plan = {name: settings[name] for name in CompressionPlan.fields if name in settings}
        rest = {name: value for name, value in settings.items() if name not in in_plan}
        return rest | {"plan": CompressionPlan(**in_plan)}
    others = {name: value for name, value in settings.items() if name not in known}
    typed = {name: value for name, value in settings.items() if name in known}
    return typed | ({"settings": MeasuredSettings(**others)} if others else {})


def cut_file(settings: dict[str, Any]) -> Any:
    """What the demo is cut to; a file cannot come of it, but ranks can."""
    plan = Request.parse(settings, to_file=True).plan
    cut = truncate(open_checkpoint(DEMO), plan)
    return cut.plan, cut.ranks


def question(route: Route, setting: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What leads to the route without a setting, and the same with it."""
    without = dict(ON_ROUTE[route])
    if setting == "inner_shape" and route is Route.MEASURED:  # which goes with terms only
        without = {"base": "base", "data": "texts.txt", "separation_rank": 2}
    if setting == "kl":
        without["statistics"] = VALUES["statistics"]
    asked = without
    if setting in ALL_GOALS:
        asked = {name: value for name, value in without.items() if name not in ALL_GOALS}
    return without, asked | {setting: VALUES.get(setting, TYPED.get(setting, True))}


def leads_elsewhere(route: Route, setting: str) -> bool:
    """Return whether a setting decides about the route by itself, so that no route is asked."""
    if route is Route.SEARCHED:
        return setting in ("base", "separation_rank", *SHARES_TO_KEEP)
    if route is Route.GIVEN_TERMS:
        return setting in ("base", *ALL_GOALS) and setting != "separation_rank"
    return (route, setting) in ((Route.TRUNCATED, "base"), (Route.MEASURED, "to"))


def pairs(settings: Iterable[str]) -> list[Any]:
    return [
        pytest.param(route, setting, id=f"{route.value} {setting}")
        for route in Route
        for setting in sorted(settings)
        if not leads_elsewhere(route, setting)
    ]


@pytest.mark.parametrize(("route", "setting"), pairs(READ_ON))
def test_a_setting_reaches_the_route_or_is_refused_in_python(
    route: Route, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without, asked = question(route, setting)
    if route in READ_ON[setting]:
        plain = received_in_python(route, without, monkeypatch)
        assert received_in_python(route, asked, monkeypatch) != plain
        return
    words = rf"\b{setting}\b.* (is|are) (not read where|read with|never read together with) "
    with pytest.raises(LsrError, match=words):
        received_in_python(route, asked, monkeypatch)


@pytest.mark.parametrize("setting", SEARCH_ONLY)
def test_given_terms_search_for_nothing_with_a_base_either(setting: str) -> None:
    on_base = {**ON_ROUTE[Route.MEASURED], "ratio": None, "separation_rank": 2}
    words = rf"^{setting} is read with a goal that is searched for, such as ratio=$"
    with pytest.raises(SettingsError, match=words):
        compress(DEMO, **on_base, **{setting: VALUES[setting]})


# -- each option on each route, on the command line ------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("texts.txt", "other.txt"):
        (tmp_path / name).write_text("a text\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_module, "_to_directories", arrive)
    monkeypatch.setattr(resize, "resize", arrive)
    return tmp_path


def typed(settings: dict[str, Any]) -> list[str]:
    """The options of settings, as they are typed."""
    words: list[str] = []
    for name, value in settings.items():
        if value is None:
            continue
        text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += [flag(name)] if value is True else [flag(name), text]
    return words


def received_by_command(settings: dict[str, Any]) -> str:
    done = CliRunner().invoke(app, ["compress", str(DEMO), *typed(settings)])
    if isinstance(done.exception, Arrived):
        return str(done.exception)
    raise done.exception or AssertionError(done.output)


@pytest.mark.parametrize(("route", "setting"), pairs(options_of_the_command()))
def test_an_option_reaches_the_route_or_is_refused_on_the_command_line(
    route: Route, setting: str, folder: Path
) -> None:
    without, asked = question(route, setting)
    ending = ".safetensors" if route in TO_FILE else ""
    without, asked = ({"out": f"small{ending}"} | each for each in (without, asked))
    if setting == "out":
        asked["out"] = f"other{ending}"
    if route in {**READ_ON, **OWN_OPTIONS}[setting]:
        assert received_by_command(asked) != received_by_command(without)
        return
    words = rf"{flag(setting)}\b.* (is|are) (not read where|read with|never read together with) "
    if setting == "to":  # it is the others that are not read with it
        words = "(is|are) (not read where .*: leave out|never read together with) --to"
    with pytest.raises(LsrError, match=words):
        received_by_command(asked)


# -- the examples that were ignored ----------------------------------------------------------------


def refused(*words: str) -> str:
    done = CliRunner().invoke(app, ["compress", str(DEMO), *words])
    assert isinstance(done.exception, LsrError), done.output
    return str(done.exception)


def test_options_about_a_base_are_refused_without_one() -> None:
    words = (
        "--ratio 8 --passes 2 --held-out 20 --examples 5 --dtype bfloat16 --batch 4 --max-length "
        "99 --truncate"
    )
    text = refused(*words.split(), "--dry-run")
    assert text.endswith("are read with --base")
    for name in ("--passes", "--held-out", "--examples", "--dtype", "--batch", "--max-length"):
        assert name in text
    with pytest.raises(SettingsError, match=r"^passes is read with base=$"):
        compress(
            "absent", ratio=8, settings=MeasuredSettings(passes=2)
        )  # refused before anything is opened


def test_options_of_a_search_are_refused_where_a_file_is_cut() -> None:
    words = "--ratio 4 --out x.safetensors --record --workers 3 --passes 2 --device cuda"
    text = refused(*words.split())
    way = "not read where a LoRA file is written: name a directory, such as --out small/"
    assert f"--workers and --record are {way};" in text
    assert f"--passes is {way}, with --base and --data" in text
    assert "--device is read with --base" in text


def test_two_goals_are_the_same_refusal_in_both_doors() -> None:
    text = refused("--ratio", "8", "--keep", "0.9", "--dry-run")
    assert text.startswith("one goal is needed, got --keep and --ratio: ")
    with pytest.raises(BudgetError, match="^one goal is needed, got keep and ratio: "):
        compress(DEMO, ratio=8, keep=0.9)


def test_a_share_without_a_base_is_the_same_refusal_in_both_doors() -> None:
    text = refused("--keep", "0.9", "--dry-run")
    assert text.startswith("a share to keep is measured on a base: give --base, and --data")
    with pytest.raises(BudgetError, match="give base=, and data= if you have texts, with keep="):
        compress(DEMO, keep=0.9)


def test_a_split_is_refused_where_a_share_chooses_the_shapes() -> None:
    with pytest.raises(BudgetError, match="inner_shape goes with separation_rank"):
        compress(DEMO, base="b", data="texts.txt", keep=0.9, inner_shape=(2, 2))


def test_terms_take_one_storage() -> None:
    with pytest.raises(BudgetError, match="with separation_rank name one, such as int8"):
        CompressionPlan(separation_rank=2, storage="auto")


def test_a_record_and_a_replacement_need_something_to_write() -> None:
    for words in (("--record",), ("--force",)):
        done = CliRunner().invoke(app, ["compress", str(DEMO), "--ratio", "8", "--dry-run", *words])
        assert done.exit_code == 2
        assert f"{words[0]}: is read with --out" in done.output


# -- plans and their storage -----------------------------------------------------------------------

QUICK = Search(orders=(2,), rounds=0)


def test_a_search_draws_no_plan_of_another_storage() -> None:
    searched = search_adapter(
        open_checkpoint(DEMO), [CompressionPlan(ratio=48)], search=Search(orders=(), rounds=0)
    )
    for ask in (searched.compress, searched.expected_error):
        with pytest.raises(BudgetError, match="in float32, and this plan is stored in int8: sea"):
            ask(CompressionPlan(ratio=48, storage="int8"))
        with pytest.raises(BudgetError, match="calibrate first and pass the statistics"):
            ask(CompressionPlan(kl=0.1))
    of_terms = searched.compress(CompressionPlan(separation_rank=1, storage="int8"))
    assert {row.storage for row in of_terms.layers} == {"int8"}


def test_a_search_for_given_terms_refuses_what_only_a_search_reads() -> None:
    plans, lora = [CompressionPlan(separation_rank=1)], open_checkpoint(DEMO)
    with pytest.raises(SettingsError, match="^search is read with a goal that is searched for"):
        search_adapter(lora, plans, search=QUICK)
    resources = Resources(workers=2, journal=VALUES["journal"])
    with pytest.raises(SettingsError, match="^journal and workers are read with a goal that is"):
        search_adapter(lora, plans, resources=resources)


def test_a_file_is_cut_in_the_storage_of_its_plan(tmp_path: Path) -> None:
    lora = open_checkpoint(DEMO)
    for plan, storage in (
        (CompressionPlan(ratio=4), "float32"),  # that of the demo
        (CompressionPlan(ratio=4, storage="bfloat16"), "bfloat16"),
    ):
        out = truncate(lora, plan).save(tmp_path / storage)
        assert open_checkpoint(out).storage == storage
    words = r"^storage=int8 is not read where a LoRA file is written: call lsrdecomp\.compress$"
    with pytest.raises(SettingsError, match=words):
        truncate(lora, CompressionPlan(ratio=4, storage="int8"))
    with pytest.raises(BudgetError, match="a plan was given, and storage beside it"):
        truncate(lora, CompressionPlan(ratio=4, storage="bfloat16"), storage="float16")


def test_a_cut_refuses_what_it_does_not_read() -> None:
    lora = open_checkpoint(DEMO)
    with pytest.raises(ArgumentError, match="^truncate takes no 'passes'"):
        truncate(lora, ratio=4, passes=2)
    with pytest.raises(SettingsError, match=r"^kl is not read .*: call lsrdecomp\.compress$"):
        truncate(lora, CompressionPlan(kl=0.1))


def test_a_request_takes_the_storage_that_suits_its_goal() -> None:
    on_base = {"base": "b", "data": "texts.txt"}
    assert Request.parse({"keep": 0.9, **on_base}).for_adapter("float16").storage == "auto"
    assert Request.parse({"bytes": 9000, **on_base}).for_adapter("float16").storage == "auto"
    assert Request.parse({"ratio": 9, **on_base}).for_adapter("float16").storage == "float16"
    assert Request.parse({"bytes": 9000}).for_adapter("float16").storage == "auto"
    told = Request.parse({"bytes": 9000, "storage": "bfloat16"}).for_adapter("float16")
    assert told.storage == "bfloat16"
    plan = CompressionPlan(ratio=9)
    given = Request.parse({}, plan=plan).for_adapter("float16")
    assert (given.storage, given.plan.storage) == ("float16", "float16")
    in_float32 = Request.parse({"storage": "float32"}, plan=plan).for_adapter("float16")
    assert in_float32.plan.storage == "float32"


def test_settings_of_different_roads_do_not_send_one_in_a_circle() -> None:
    text = refused("--only", "*.query", "--structure", "lsr", "--ratio", "8", "--dry-run")
    assert "--only is never read together with --structure: leave one of the two out" in text
