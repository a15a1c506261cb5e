"""Reasons: what differences of layers look like, in sentences with a code."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from lsrdecomp.lora.files.layer_names import module_role
from lsrdecomp.lora.measure.layer_differences import SCALE_SPREAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from lsrdecomp.lora.files import Checkpoint
    from lsrdecomp.lora.measure.layer_differences import LayerDifference

MOST = 0.75
"""Share of ΔW below which rounding is said to have taken some of it; by hand."""
FAULTS = {
    "missing": "layers that are the base's",
    "experts": "experts that are the base's",
    "unknown": "layers that the LoRA has not",
    "not-finite": "numbers that are NaN or infinite",
    "size": "layers of other sizes",
    "scale": "ΔW at another scale",
    "merged-twice": "ΔW added twice",
    "exchanged": "layers in each other's place",
    "transposed": "ΔW transposed",
    "permuted": "rows or columns in another order",
    "unrelated": "numbers of another adapter",
    "magnitudes": "DoRA without its magnitudes",
    "base": "weights of another base",
    "tokenizer": "another tokenizer",
    "heads": "other tensors beside the layers",
    "not-opened": "does not open on the base",
    "not-acting": "a server on which it does not act",
}
"""Reasons that make an output damaged, by code."""
OTHERS = {
    "rounded": "rounding of merged weights",
    "approximated": "a smaller approximation",
    "dropped": "layers that were left out on purpose",
}
"""Reasons that say how an output was made."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Something that was found, with the layers that it was found in.

    Examples
    --------
    >>> str(Reason("scale", "ΔW is 0.5 times as large", ("q_proj",)))
    'scale: ΔW is 0.5 times as large'
    """

    code: str
    sentence: str
    layers: tuple[str, ...] = ()

    @property
    def is_fault(self) -> bool:
        """Whether it makes an output damaged."""
        return self.code in FAULTS

    def __str__(self) -> str:
        """Return the code and the sentence."""
        return f"{self.code}: {self.sentence}"


def reasons_of(
    differences: Sequence[LayerDifference],
    source: Checkpoint,
    *,
    merged: bool,
    storage: str = "",
    may_lack: Callable[[str], bool] = lambda _name: False,
) -> list[Reason]:
    """Return what differences look like, faults first.

    Parameters
    ----------
    differences : sequence of LayerDifference
    source : Checkpoint
        The LoRA.
    merged : bool
        Whether the other is a merged model.
    storage : str
        What merged weights are stored in.
    may_lack : callable
        Whether a layer was left out on purpose, by its name.
    """
    by_code: dict[str, list[LayerDifference]] = defaultdict(list)
    for each in _with_common_scale(differences):
        code = each.code
        if code == "missing" and may_lack(each.name):
            code = "dropped"
        elif code == "missing" and ".experts" in each.name:
            code = "experts"
        by_code[code].append(each)
    names = [each.name for each in differences]
    reasons = []
    for code, found in by_code.items():
        if code == "scale":
            reasons += _scale_reasons(found, names, source, merged=merged)
        elif code != "same":
            sentence = _sentence(code, found, where([each.name for each in found], names), storage)
            reasons.append(Reason(code, sentence, tuple(each.name for each in found)))
    return sorted(reasons, key=lambda reason: not reason.is_fault)


def _with_common_scale(differences: Sequence[LayerDifference]) -> list[LayerDifference]:
    """Return approximations that are all too large or small by one factor as of another scale."""
    found = list(differences)
    for code in ("approximated", "rounded"):
        scales = [each.scale for each in found if each.code == code and each.scale]
        if len(scales) < 2 or abs(median(scales) - 1.0) <= SCALE_SPREAD:
            continue
        if max(scales) <= (1.0 + SCALE_SPREAD) * min(scales):
            found = [replace(each, code="scale") if each.code == code else each for each in found]
    return found


def _sentence(code: str, found: Sequence[LayerDifference], place: str, storage: str) -> str:
    """Return what was found, and where."""
    errors = [each.relative_error for each in found if each.relative_error is not None]
    largest = max(errors, default=0.0)
    first = found[0]
    scales = [each.scale for each in found if each.scale is not None]
    left = ""
    if code == "rounded" and scales and min(scales) < MOST:
        left = f": {max(0.0, min(scales)):.2g} to {max(scales):.2g} of ΔW is left"
    sentences = {
        "missing": f"{place} are the base's: nothing of ΔW is there",
        "experts": f"{place} are the base's: these experts were not converted or not loaded",
        "dropped": f"{place} were left out when it was written",
        "not-finite": f"{place} cannot be compared: {first.resembles}",
        "size": f"{place} are of other sizes, {first.name}: {first.resembles}",
        "exchanged": f"{place} hold the ΔW of another layer, {first.name} that of "
        f"{first.resembles}",
        "transposed": f"{place} hold ΔW transposed: fan_in_fan_out was not obeyed",
        "permuted": f"{place} hold ΔW with rows or columns in another order, as llama.cpp has "
        "those of q and k",
        "unrelated": f"{place} have nothing in common with ΔW: it is another adapter's",
        "rounded": f"{place} are rounded to {storage}, by up to {largest:.2g} times ΔW{left}",
        "approximated": f"{place} are approximated, with a weight error of up to {largest:.2g}",
    }
    return sentences[code]


def _scale_reasons(
    found: Sequence[LayerDifference], names: Sequence[str], source: Checkpoint, *, merged: bool
) -> list[Reason]:
    """Return a reason for each scale that layers have."""
    groups: list[list[LayerDifference]] = []
    for each in sorted(found, key=lambda each: each.scale or 0.0):
        if groups and _near(each.scale or 0.0, groups[-1][0].scale or 0.0):
            groups[-1].append(each)
        else:
            groups.append([each])
    reasons = []
    for group in groups:
        factor = median(each.scale or 0.0 for each in group)
        layers = [name for name in names if any(each.name == name for each in group)]
        causes = _causes(factor, [source.layer(name) for name in layers], merged=merged)
        code = "merged-twice" if causes[:1] == [TWICE] else "scale"
        reason = f": {' or '.join(causes)}" if causes else ""
        size = f"{factor:.3g} times as large"
        if 0.0 < factor < 1.0:
            size = f"{1.0 / factor:.3g} times too small"
        sentence = f"ΔW is {size} in {where(layers, names)}{reason}"
        reasons.append(Reason(code, sentence, tuple(layers)))
    return reasons


TWICE = "it was merged twice"


def _causes(factor: float, layers: Iterable[object], *, merged: bool) -> list[str]:
    """Return what makes ΔW so many times as large in all of some layers."""
    causes: list[str] | None = None
    for layer in layers:
        rank = int(getattr(layer, "rank", 1))
        scale = float(getattr(layer, "scale", 1.0))
        by_cause = {
            "it was subtracted": -1.0,
            "alpha was not read": 1.0 / scale,
            "alpha was taken for the scale, not divided by the rank": float(rank),
            "the rank divides it twice": 1.0 / rank,
            "rsLoRA was ignored, alpha is to be divided by the root of the rank": rank**-0.5,
            "alpha was divided by the root of the rank, as for rsLoRA": rank**0.5,
        }
        if merged:
            by_cause = {TWICE: 2.0, **by_cause}
        matching = [
            cause
            for cause, expected in by_cause.items()
            if _near(factor, expected) and not _near(expected, 1.0)
        ]
        causes = matching if causes is None else [each for each in causes if each in matching]
    return causes or []


def _near(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=SCALE_SPREAD)


def where(layers: Sequence[str], every: Sequence[str]) -> str:
    """Return which of all layers some are, as briefly as can be said.

    >>> every = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(4) for part in "qv"]
    >>> where(every[4:], every), where(every, every), where(every[::2], every)
    ('layers 2 to 3 (4 of 8 matrices)', 'all 8 matrices', 'all 4 of self_attn.q_proj')
    >>> where(every[:1], every)
    'model.layers.0.self_attn.q_proj'
    """
    if len(layers) == len(every):
        return f"all {len(every)} matrices"
    if len(layers) == 1:
        return layers[0]
    count = f"{len(layers)} of {len(every)} matrices"
    in_blocks = _grouped(layers, _block)
    all_blocks = _grouped(every, _block)
    if None not in in_blocks and all(in_blocks[each] == all_blocks[each] for each in in_blocks):
        numbers = sorted(int(each) for each in in_blocks if each is not None)
        if numbers == list(range(numbers[0], numbers[-1] + 1)):
            span = f"layer {numbers[0]}"
            if len(numbers) > 1:
                span = f"layers {numbers[0]} to {numbers[-1]}"
            return f"{span} ({count})"
    by_role = _grouped(layers, module_role)
    all_roles = _grouped(every, module_role)
    if all(by_role[role] == all_roles[role] for role in by_role):
        return f"all {len(layers)} of {' and '.join(str(role) for role in by_role)}"
    return f"{count}, the first {layers[0]},"


def _grouped(
    names: Iterable[str], key: Callable[[str], str | None]
) -> Mapping[str | None, list[str]]:
    groups: dict[str | None, list[str]] = defaultdict(list)
    for name in names:
        groups[key(name)].append(name)
    return groups


def _block(name: str) -> str | None:
    """Return the first number in a layer's name, as text."""
    found = re.search(r"[._](\d+)[._]", name)
    return found[1] if found else None
