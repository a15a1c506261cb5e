"""Make an adapter kind known to PEFT: a real member of its closed enum, and one entry in each of its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import register_peft_method
from peft.utils.peft_types import PeftType

from lsrdecomp.errors import LsrError

if TYPE_CHECKING:
    from enum import Enum


def register(name: str, config_cls: type[Any], model_cls: type[Any]) -> Any:
    """Register an adapter kind with PEFT; doing so twice changes nothing.

    Parameters
    ----------
    name : str
        Lower-case name, such as ``"lsr"``. The prefix of its parameters is the name with an
        underscore.
    config_cls, model_cls : type
        The kind's `peft.PeftConfig` and `peft.tuners.tuners_utils.BaseTuner`.

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
        raise LsrError(
            f"PEFT type {name.upper()} already belongs to {registered.__module__}.{registered.__qualname__}; "
            f"{config_cls.__module__} cannot register it too. Import only one of the two in a process."
        )
    register_peft_method(name=name, config_cls=config_cls, model_cls=model_cls)
    return member


def add_member(enum_cls: type[Enum], name: str) -> Any:
    """Extend a string enum by a member whose value is its name; an existing member is returned as it is.

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
    if name not in getattr(
        enum_cls, "_hashable_values_", [name]
    ):  # Python 3.13 looks here for `in`
        enum_cls._hashable_values_.append(name)  # type: ignore[attr-defined]
    # EnumType.__setattr__ refuses to reassign members, and from 3.12 on attribute access no longer
    # consults the map.
    type.__setattr__(enum_cls, name, member)
    return member
