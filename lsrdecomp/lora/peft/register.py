"""Make an adapter type known to PEFT: a member of its closed enum, an entry in each table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import register_peft_method
from peft.utils.peft_types import PeftType

from lsrdecomp.errors import LsrError

if TYPE_CHECKING:
    from enum import Enum


def register(name: str, config_cls: type[Any], model_cls: type[Any]) -> Any:
    """Register an adapter type with PEFT; registering it again changes nothing.

    Parameters
    ----------
    name : str
        Lower-case name, such as ``"lsr"``. The prefix of its parameters is the name with an
        underscore.
    config_cls, model_cls : type
        The type's `peft.PeftConfig` and `peft.tuners.tuners_utils.BaseTuner`.

    Returns
    -------
    PeftType
        The enum member, ``PeftType.LSR`` for ``"lsr"``.

    Raises
    ------
    LsrError
        If PEFT itself, or another library, already uses the name for something else.
    """
    member = add_member(PeftType, name.upper())
    registered = PEFT_TYPE_TO_CONFIG_MAPPING.get(member)
    if registered is config_cls:
        return member
    if registered is not None:
        owner = f"{registered.__module__}.{registered.__qualname__}"
        raise LsrError(
            f"PEFT type {name.upper()} already belongs to {owner}; {config_cls.__module__} cannot "
            "register it too. Import only one of the two in a process."
        )
    register_peft_method(name=name, config_cls=config_cls, model_cls=model_cls)
    return member


def add_member(enum_cls: type[Enum], name: str) -> Any:
    """Return the member of a string enum whose value is its name; a new one is added.

    PEFT keeps `PeftType` closed and offers no entry point. Values that only look like a member
    (plain strings, a second enum) fail where PEFT or transformers reads ``.value``, so the member
    is built as `enum` builds it.
    """
    if name in enum_cls.__members__:
        return enum_cls[name]
    member: Any = str.__new__(enum_cls, name)  # type: ignore[type-var]
    member._name_ = name
    member._value_ = name
    member._sort_order_ = len(enum_cls._member_names_)
    member.__objclass__ = enum_cls
    enum_cls._member_names_.append(name)
    enum_cls._member_map_[name] = member
    enum_cls._value2member_map_[name] = member
    hashable_values = getattr(enum_cls, "_hashable_values_", None)
    if hashable_values is not None and name not in hashable_values:
        hashable_values.append(name)  # where Python 3.13 looks for ``in``
    # EnumType.__setattr__ refuses to reassign members, and from 3.12 on attribute access no longer
    # consults the map.
    type.__setattr__(enum_cls, name, member)
    return member
