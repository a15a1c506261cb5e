"""Learning rates: the default of a method, and trials of three around it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lsrdecomp.gateway import read_json_text
from lsrdecomp.lora.files.writing import new_file
from lsrdecomp.lora.train.finetune_settings import AUTO, FinetuneSettings
from lsrdecomp.lora.train.methods import find_method
from lsrdecomp.lora.train.rate_trials import RateTrial, clear_winner, trial_steps
from lsrdecomp.lora.train.trainable_model import trainable_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from peft import PeftModel

RATE = "rate.json"
"""File in the directory of an unfinished run, with the rate that was chosen by trials."""


MULTIPLES = (1 / 3, 1.0, 3.0)
"""Rates that are tried with ``learning_rate = "auto"``, in units of the method's default."""


@dataclass(frozen=True, slots=True)
class ChosenRate:
    """A learning rate, and the trials that chose it: rate and mean loss of the last steps."""

    rate: float
    trials: tuple[tuple[float, float | None], ...] = ()


def default_rate(
    method: str, model: PeftModel, adapter: str = "default", *, trained: bool = False
) -> float:
    """Return the learning rate of a method for an opened adapter, to two digits.

    It is what the method's `RateRule` says for rank, terms and inputs, of several layers the
    geometric mean; less for an adapter that was trained, or made of one that was.

    Parameters
    ----------
    method : str
        A key of `METHODS`.
    model : PeftModel
    adapter : str
    trained : bool
        Whether the adapter is trained on.
    """
    rule = find_method(method).rate
    rates = [rule.rate(*size) for size in _layer_sizes(model, adapter)] or [rule.rate(1, 1, None)]
    mean = math.exp(sum(map(math.log, rates)) / len(rates))
    if trained:
        mean *= 0.5  # it has less far to go; by hand
    return float(f"{mean:.2g}")


def _layer_sizes(model: PeftModel, adapter: str) -> Iterator[tuple[float, float, float | None]]:
    """Yield rank, terms and inputs of each adapted layer.

    Of two sides the geometric mean of the terms. The inputs are None where an output is no sum over
    them, as in an embedding, which looks up a row, and where a layer does not say.
    """
    for module in model.modules():
        layout = getattr(module, "layout", {})
        ranks = getattr(module, "r", {})
        width = None if _is_lookup(module) else getattr(module, "in_features", None)
        if isinstance(layout, dict) and adapter in layout:
            terms = math.prod(layout[adapter].separation_ranks)
            yield layout[adapter].r, math.sqrt(terms), width
        elif isinstance(ranks, dict) and adapter in ranks:
            yield ranks[adapter], 1.0, width


def _is_lookup(module: nn.Module) -> bool:
    """Return whether an adapted layer is an embedding."""
    base_layer = getattr(module, "get_base_layer", None)
    return base_layer is not None and isinstance(base_layer(), nn.Embedding)


def choose_rate(
    settings: FinetuneSettings,
    model: PeftModel,
    steps: int,
    run_trial: Callable[[float, int], Sequence[float]],
    file: Path,
) -> ChosenRate:
    """Return the learning rate of a run: as settings have it, the method's own, or by trials.

    Parameters
    ----------
    settings : FinetuneSettings
    model : PeftModel
        Its trained numbers are afterwards what they were.
    steps : int
        Steps of the run, which makes all of them after the trials.
    run_trial : callable
        Trains for some steps with a rate, and returns the loss before each.
    file : Path
        Where the choice is kept, for a run that is killed and goes on.
    """
    if settings.learning_rate is not None and settings.learning_rate != AUTO:
        return ChosenRate(float(settings.learning_rate))
    default = default_rate(settings.method, model, trained=settings.init is not None)
    if settings.learning_rate is None:
        return ChosenRate(default)
    if file.exists():
        return _read_choice(file)
    # 1. Try each rate from the same start.
    n_steps = trial_steps(steps, at_least=8)  # the first ones rise, and the last are compared
    start = {name: value.detach().clone() for name, value, _ in trainable_parameters(model)}

    def run(rate: float) -> RateTrial[None]:
        losses = run_trial(rate, n_steps)
        _restore(model, start)
        return RateTrial(rate, losses, None)

    rates = [float(f"{multiple * default:.2g}") for multiple in MULTIPLES]
    trials = [run(rate) for rate in rates]
    # 2. Take the default unless another is two standard errors ahead: a few steps tell little.
    preferred = trials[MULTIPLES.index(1.0)]
    best = clear_winner(trials, preferred, min_std_errors=2.0)
    choice = ChosenRate(best.rate, tuple(trial.record for trial in trials))
    with new_file(file, force=True) as part:
        part.write_text(json.dumps([choice.rate, choice.trials]), encoding="utf-8")
    return choice


def _read_choice(file: Path) -> ChosenRate:
    rate, trials = read_json_text(file.read_text(encoding="utf-8"))
    return ChosenRate(rate, tuple((tried, loss) for tried, loss in trials))


@torch.no_grad()
def _restore(model: PeftModel, start: dict[str, Tensor]) -> None:
    """Set trained parameters to what they were."""
    for name, parameter, _ in trainable_parameters(model):
        parameter.copy_(start[name])
        parameter.grad = None
