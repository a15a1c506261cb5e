"""Help that fits 80 columns, examples that the command line accepts, errors in its own words."""

import contextlib
import io
import shlex
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from lsrdecomp.cli.app import app
from lsrdecomp.cli.help import EXAMPLES, PANELS, flags

ROOT = Path(__file__).resolve().parents[2]
VERBS = sorted(get_command(app).commands)


def test_every_verb_has_an_example():
    assert set(VERBS) <= set(EXAMPLES)


def test_no_short_help_is_cut_at_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = CliRunner().invoke(app, ["-h"]).stdout
    for verb in VERBS:
        assert get_command(app).commands[verb].help.split("\n")[0] in text, verb
    assert "..." not in text.split("Commands:")[1]


@pytest.mark.parametrize("verb", VERBS)
def test_the_whole_help_of_every_verb_is_on_its_page(verb):
    flag = "--help-all" if verb in PANELS else "--help"
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    assert f"```{{shell}}\nlsrdecomp {verb} {flag}\n```" in page


@pytest.mark.parametrize("verb", PANELS)
def test_help_shows_fifteen_options_at_most_in_panels_and_all_on_request(verb):
    short, whole = (CliRunner().invoke(app, [verb, flag]).stdout for flag in ("-h", "--help-all"))
    sections = short.split("\n\n")
    for panel, names in PANELS[verb].items():
        (section,) = (each for each in sections if each.startswith(f"{panel}:"))
        assert all(f"--{name}" in section for name in names.split())
    assert sum(len(names.split()) for names in PANELS[verb].values()) <= 15
    every = {
        option.opts[0]
        for option in get_command(app).commands[verb].params
        if option.opts[0].startswith("-")
    }
    assert all(f"  {flag}" in whole for flag in every - {"--help-all"})
    assert not all(f"  {flag}" in short for flag in every - {"--help-all"})


@pytest.mark.parametrize("verb", PANELS)
def test_the_short_help_ends_at_the_form_feed_and_shows_none(verb):
    shown, whole = (CliRunner().invoke(app, [verb, flag]).stdout for flag in ("-h", "--help-all"))
    assert "\\f" not in whole
    text = get_command(app).commands[verb].help
    if "\f" in text:
        rest = text.split("\f")[1].replace("\b", "").split()[:6]
        assert " ".join(rest) not in " ".join(shown.split())
        assert " ".join(rest) in " ".join(whole.split())


def test_the_whole_help_leaves_the_short_one_as_it_was():
    program = get_command(app)

    def shown(flag: str) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            program.main(["compress", flag], "lsrdecomp", standalone_mode=False)
        return out.getvalue()

    short, whole, again = shown("-h"), shown("--help-all"), shown("-h")
    assert short == again != whole


@pytest.mark.parametrize(
    ("verb", "example"), [(verb, example) for verb in VERBS for example in EXAMPLES[verb]]
)
def test_the_options_of_every_example_exist(verb, example):
    given = {word for word in shlex.split(example) if word.startswith("--")}
    known = {
        option for parameter in get_command(app).commands[verb].params for option in parameter.opts
    }
    assert given <= known


def test_an_error_names_the_flag():
    assert flags("its alpha is not in it; pass alpha= as it was trained") == (
        "its alpha is not in it; pass --alpha as it was trained"
    )
    assert flags("replace it by force=True") == "replace it by --force"
    assert flags("got rtol=0.5 and rank=3") == "got rtol=0.5 and rank=3", "a value is no advice"


@pytest.mark.parametrize(
    ("verb", "option", "typed", "offered"),
    [
        ("compress", "--storage", "int", {"int8", "int4"}),
        ("compress", "--to", "", {"same", "mlx"}),
        ("compress", "--dtype", "b", {"bfloat16"}),
        ("compress", "--structure", "", {"lsr"}),
        ("fleet", "--storage", "a", {"auto"}),
        ("calibrate", "--answers", "", {"completion", "all"}),
        ("measure", "--dtype", "b", {"bfloat16"}),
        ("calibrate", "--dtype", "f", {"float32"}),
        ("export", "--to", "k", {"kohya"}),
        ("export", "--profile", "", {"common", "peft"}),
        ("export", "--storage", "q", {"q8_0"}),
        ("finetune", "--task", "s", {"scores"}),
        ("finetune", "--method", "l", {"lora", "lsr"}),
    ],
)
def test_a_shell_is_offered_the_values_of_an_option(verb, option, typed, offered):
    program = get_command(app)
    command = program.commands[verb]
    (parameter,) = (each for each in command.params if option in each.opts)
    # A command keeps the names of its help option, which the parent of its first context says.
    parent = program.make_context("lsrdecomp", [], resilient_parsing=True)
    context = command.make_context(verb, [], parent=parent, resilient_parsing=True)
    items = parameter.shell_complete(context, typed)
    found = {item.value for item in items}
    assert found
    assert all(value.startswith(typed) for value in found)
    if (verb, option) != ("finetune", "--method"):
        assert found == offered
    else:
        assert found & offered
