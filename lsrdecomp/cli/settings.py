"""Options of a verb from the fields of its settings: what a field says of itself is all that is written."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from lsrdecomp.cli.help import PANELS, HelpAll
from lsrdecomp.cli.outputs import Input
from lsrdecomp.fields import INPUT_PATH, ON_COMMAND_LINE, Field, Settings

HELP_ALL = inspect.Parameter(
    "help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=HelpAll
)

V = TypeVar("V", bound=Callable[..., Any])


def options_of(
    settings: type[Settings],
    *,
    only: tuple[str, ...] | None = None,
    parsers: Mapping[str, tuple[Callable[[str], Any], str]] = MappingProxyType({}),
) -> Callable[[V], V]:
    """The verb, whose ``**options`` takes the fields that are options; ``--help-all`` lists the others for ``--set``.

    ``options`` holds what was on the command line, under the names of the fields. A field of the
    name of a parameter is left to the verb itself; with ``only``, those named there are the
    options, and neither defaults nor others are shown. A field in ``parsers`` is read from its text
    by a function, and shown as the word beside it.
    """

    def decorate(verb: V) -> V:
        signature = inspect.signature(verb, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        before = [each for each in own if each.kind is not each.KEYWORD_ONLY]
        fields = [
            each for each in settings.fields.values() if each.name not in signature.parameters
        ]
        chosen = [
            each
            for each in fields
            if (ON_COMMAND_LINE in each.flags if only is None else each.name in only)
        ]
        made = [_parameter(each, parsers.get(each.name), default=only is None) for each in chosen]
        if verb.__name__ in PANELS and HELP_ALL.name not in signature.parameters:
            made.append(HELP_ALL)
        names = {each.name for each in made}

        @functools.wraps(verb)
        def run(*args: Any, help_all: bool = False, **kwargs: Any) -> Any:
            unset = [name for name in names if kwargs.get(name) in (None, [])]
            return verb(
                *args, **{name: value for name, value in kwargs.items() if name not in unset}
            )

        run.__signature__ = signature.replace(parameters=[*before, *made, *own[len(before) :]])  # type: ignore[attr-defined]
        run.__annotations__ = verb.__annotations__ | {each.name: each.annotation for each in made}
        rest = [each for each in fields if each not in chosen]
        if only is None and rest:
            run.__doc__ = f"{inspect.cleandoc(verb.__doc__ or '')}\n\f\n{_listed(rest)}"
        return run  # type: ignore[return-value]

    return decorate


def option_groups(**groups: type[Any]) -> Callable[[V], V]:
    """The verb, whose parameters of these names are each a dataclass of options, given one by one where it is called.

    Fields are annotated as typer's parameters are. The verb gets them as one value a group.
    """
    fields = {name: dataclasses.fields(group) for name, group in groups.items()}
    hints = {name: get_type_hints(group, include_extras=True) for name, group in groups.items()}
    made = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[name][field.name],
        )
        for name in groups
        for field in fields[name]
    ]

    def decorate(verb: V) -> V:
        signature = inspect.signature(verb, eval_str=True)
        parameters = list(signature.parameters.values())
        place = min(i for i, each in enumerate(parameters) if each.name in groups)
        remaining = [each for each in parameters if each.name not in groups]

        @functools.wraps(verb)
        def run(*args: Any, **kwargs: Any) -> Any:
            for name, group in groups.items():
                if name in kwargs:  # a program gives the whole group
                    continue
                given = {x.name: kwargs.pop(x.name) for x in fields[name] if x.name in kwargs}
                kwargs[name] = group(**given)
            return verb(*args, **kwargs)

        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*remaining[:place], *made, *remaining[place:]]
        )
        own = {name: hint for name, hint in verb.__annotations__.items() if name not in groups}
        run.__annotations__ = own | {each.name: each.annotation for each in made}
        return run  # type: ignore[return-value]

    return decorate


def _parameter(
    field: Field, parsed: tuple[Callable[[str], Any], str] | None, *, default: bool
) -> inspect.Parameter:
    flags = [f"--{name.replace('_', '-')}" for name in field.names]
    usual = field.default_text.strip('"') if default and field.type is not bool else ""
    text = f"{field.help}  [default: {usual}]" if usual else field.help
    parser, metavar = parsed or (None, None)
    option = typer.Option(*flags, help=text, show_default=False, parser=parser, metavar=metavar)
    marks = (Input, option) if INPUT_PATH in field.flags else (option,)
    kind = str if parser else list[str] if field.type is tuple else field.type
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, *marks],
    )


def _listed(fields: list[Field]) -> str:
    lines = ["\b", "Settings for --set NAME=VALUE, or for the file:"]
    for field in fields:
        usual = f" [{field.default_text}]" if field.default_text else ""
        lines += textwrap.wrap(
            f"{field.name:<23}{field.help}{usual}",
            78,
            initial_indent="  ",
            subsequent_indent=" " * 25,
        )
    return "\n".join(lines)
