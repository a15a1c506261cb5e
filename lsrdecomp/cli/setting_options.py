"""Options of a verb from the fields of its settings, which say all that is written of them."""

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
from lsrdecomp.fields import ON_COMMAND_LINE, Field, Settings

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
    """Decorate a verb whose ``**options`` takes the fields of settings that are options.

    ``options`` then holds what was on the command line, under the names of the fields; a field of
    the name of a parameter is left to the verb itself. ``--help-all`` lists the other fields for
    ``--set``.

    Parameters
    ----------
    settings : type of Settings
    only : tuple of str, optional
        The fields that are options; neither defaults nor other fields are then shown.
    parsers : Mapping of field to function and word
        How a field is read from its text, and the word that help has for it.
    """

    def decorate(verb: V) -> V:
        signature = inspect.signature(verb, eval_str=True)
        taken = signature.parameters
        # 1. The fields that become options, before the verb's own.
        fields = [field for field in settings.fields.values() if field.name not in taken]
        if only is None:
            chosen = [field for field in fields if ON_COMMAND_LINE in field.flags]
        else:
            chosen = [field for field in fields if field.name in only]
        options = [
            _parameter(field, parsers.get(field.name), show_default=only is None)
            for field in chosen
        ]
        if verb.__name__ in PANELS and HELP_ALL.name not in taken:
            options.append(HELP_ALL)
        own = [each for each in taken.values() if each.kind is not each.VAR_KEYWORD]
        place = sum(each.kind is not each.KEYWORD_ONLY for each in own)
        names = {field.name for field in chosen}

        # 2. The verb is given those that were typed.
        @functools.wraps(verb)
        def run(*args: Any, help_all: bool = False, **kwargs: Any) -> Any:
            del help_all  # its callback has shown all
            absent = [name for name in names & set(kwargs) if kwargs[name] in (None, [])]
            for name in absent:
                del kwargs[name]
            return verb(*args, **kwargs)

        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own[:place], *options, *own[place:]]
        )
        # 3. The others are listed in its help.
        others = [field for field in fields if field not in chosen]
        if only is None and others:
            run.__doc__ = f"{inspect.cleandoc(verb.__doc__ or '')}\n\f\n{_listed(others)}"
        return run  # type: ignore[return-value]

    return decorate


def option_groups(verb: V) -> V:
    """Decorate a verb, to make each field of parameters that are dataclasses an option.

    Fields are annotated as typer's parameters are. The verb gets one value a group, and a program
    may give the whole group.
    """
    signature = inspect.signature(verb, eval_str=True)
    groups: dict[str, type[Any]] = {}
    parameters = []
    for parameter in signature.parameters.values():
        group = parameter.annotation
        if isinstance(group, type) and dataclasses.is_dataclass(group):
            groups[parameter.name] = group
            parameters += _options_of_group(group)
        else:
            parameters.append(parameter)

    @functools.wraps(verb)
    def run(*args: Any, **kwargs: Any) -> Any:
        for name, group in groups.items():
            if name not in kwargs:
                typed = {field.name for field in dataclasses.fields(group)} & set(kwargs)
                kwargs[name] = group(**{field: kwargs.pop(field) for field in typed})
        return verb(*args, **kwargs)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def _options_of_group(group: type[Any]) -> list[inspect.Parameter]:
    """Return the fields of a dataclass as keyword parameters."""
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(group)
    ]


def _parameter(
    field: Field, parsed: tuple[Callable[[str], Any], str] | None, *, show_default: bool
) -> inspect.Parameter:
    """Return a field as a parameter of a verb, read from its text by a function if there is one."""
    parser, metavar = parsed or (None, None)
    help_text = field.help
    default = field.default_text.strip('"')
    if show_default and default and field.type is not bool:
        help_text += f"  [default: {default}]"
    option = typer.Option(
        f"--{field.name.replace('_', '-')}",
        help=help_text,
        show_default=False,
        parser=parser,
        metavar=metavar,
        autocompletion=field.check.values,
    )
    type_ = field.type
    if parser is not None:
        type_ = str
    elif type_ is tuple:
        type_ = list[str]
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[type_ | None, *field.flags, option],
    )


def _listed(fields: list[Field]) -> str:
    """Return a paragraph of help for each field, after its name."""
    lines = ["\b", "Settings for --set NAME=VALUE, or for the file:"]
    for field in fields:
        default = f" [{field.default_text}]" if field.default_text else ""
        lines += textwrap.wrap(
            f"{field.name:<23}{field.help}{default}",
            78,
            initial_indent="  ",
            subsequent_indent=" " * 25,
        )
    return "\n".join(lines)
