"""Forms of an adapter, written, measured and distilled, each once: what a killed run has done is not done again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from lsrdecomp.calibration.distil import Distillation
from lsrdecomp.calibration.divergence import Behaviour
from lsrdecomp.checkpoints import Checkpoint
from lsrdecomp.checkpoints.statistics import Statistics
from lsrdecomp.checkpoints.writing import WEIGHTS, new_file
from lsrdecomp.compression.compress import Compression
from lsrdecomp.promise.bench import Bench
from lsrdecomp.promise.distil import Trial, distil_form
from lsrdecomp.promise.record import Tried
from lsrdecomp.promise.rewrite import recorded_layers


@dataclass(frozen=True)
class Form:
    """A form on disk, measured."""

    compression: Compression
    path: Path
    behaviour: Behaviour
    trial: Trial | None = None  # how it was distilled

    @property
    def distilled(self) -> int:
        """Steps of training in what is kept of it."""
        return 0 if self.trial is None else self.trial.steps

    @property
    def facts(self) -> dict[str, Any]:
        """What the record says of it beside the compression."""
        return {} if self.trial is None else {"distillation": self.trial.to_json()}


class FormMaker:
    """Writes forms to a directory, measures and distils them.

    Parameters
    ----------
    bench : Bench
    source : Checkpoint
        The LoRA.
    statistics : Statistics
        That integer codes are solved by after distillation.
    steps : int
        Of distillation; 0: none.
    folder : Path
        Where forms are kept under the hash of their numbers, with what was measured. The same folder in another run on
        the same texts, base and settings spares what is there already, and a distillation goes on from its last look.
    settings : mapping
        Of the bench, beyond those that it tells itself.
    """

    def __init__(
        self,
        bench: Bench,
        source: Checkpoint,
        statistics: Statistics,
        steps: int,
        folder: Path,
        settings: Mapping[str, Any],
    ) -> None:
        self.bench, self.source, self.statistics, self.steps = bench, source, statistics, steps
        about = [bench.source.adapter_sha256, bench.source.name, bench.size, bench.max_length, bench.seed]
        texts = repr((bench.held, bench.calibration))
        self.folder = folder / _digest(json.dumps([*about, dict(settings)]).encode(), texts.encode())
        self._tried: dict[str, Tried] = {}

    @property
    def tried(self) -> tuple[Tried, ...]:
        """Every form that was measured, in that order."""
        return tuple(self._tried.values())

    def plain(self, compression: Compression) -> Form:
        """The form as compressed."""
        new = compression.save(self.folder / "new", force=True, record=bool(self.steps))
        path = self.folder / _digest(*((new / name).read_bytes() for name in (WEIGHTS, "adapter_config.json")))
        if path.exists():
            shutil.rmtree(new)
        else:
            os.replace(new, path)
        done = path.with_suffix(".json")
        if done.exists():
            found = Behaviour(**_read(done))
        else:
            self.bench.say(f"measuring form {len(self._tried) + 1}, {compression.totals.ratio:.3g} times fewer numbers")
            found = self.bench.measure(path)
            _write(done, asdict(found))
        tried = Tried((path / WEIGHTS).stat().st_size, compression.totals.parameters, found.kept)
        self._tried.setdefault(path.name, tried)
        return Form(compression, path, found)

    def distilled(self, plain: Form, words: str = "") -> Form:
        """The form trained on the LoRA's answers, or as it was where that is no better; ``words`` say which it is."""
        out = plain.path.with_name(f"{plain.path.name}-{self.steps}")
        done = out.with_suffix(".json")
        if done.exists():
            trial = _trial(_read(done), plain.path, out)
        else:
            shutil.rmtree(out, ignore_errors=True)  # a kill came between writing and measuring
            trial = distil_form(
                self.bench,
                plain.path,
                self.source,
                out,
                steps=self.steps,
                before=plain.behaviour,
                statistics=self.statistics,
                state=out.with_suffix(".state"),
                words=words,
            )
            told = {"before": asdict(trial.before), "after": asdict(trial.after)}
            _write(done, {**told, "training": asdict(trial.training)})
        tried = self._tried[plain.path.name]
        self._tried[plain.path.name] = replace(tried, distilled=trial.better.kept, steps=trial.training.steps)
        layers = recorded_layers(trial.form) if trial.steps else plain.compression.layers
        return Form(replace(plain.compression, layers=layers), trial.form, trial.better, trial)


def _trial(told: Mapping[str, Any], made: Path, out: Path) -> Trial:
    """A trial as it was written."""
    before, after = (Behaviour(**told[name]) for name in ("before", "after"))
    training = dict(told["training"])
    checks = tuple((int(step), float(share)) for step, share in training.pop("checks"))
    trial = Trial(out, before, after, Distillation(**training, checks=checks))
    return trial if trial.better is after else replace(trial, form=made)


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _write(path: Path, value: Mapping[str, Any]) -> None:
    with new_file(path, force=True) as part:
        part.write_text(json.dumps(value), encoding="utf-8")


def _digest(*parts: bytes) -> str:
    return sha256(b"\0".join(parts)).hexdigest()[:24]
