"""`lsrdecomp.measure`: how much of a LoRA is left in what somebody made of it.

That may be another adapter, a model it was merged into, or a running server. First the weights are
compared, where there are any: which layers differ and what that looks like. With a base the outputs
are, on texts that are given or that the model writes itself.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.errors import CheckpointError, LsrError, UnsupportedError, needs
from lsrdecomp.lora.base.any_adapter import open_adapter
from lsrdecomp.lora.base.base_files import check_reachable, model_name, reachable_base
from lsrdecomp.lora.base.texts import data_for, data_name, kind_of
from lsrdecomp.lora.files import CONFIG, FORMATS, in_module_names, read_base, write_lora
from lsrdecomp.lora.files.base_modules import weight_files
from lsrdecomp.lora.files.file_checks import bytes_to_open
from lsrdecomp.lora.files.format import open_bundle
from lsrdecomp.lora.files.fused_attention import in_diffusers_names
from lsrdecomp.lora.files.progress import OnStep, ProgressUpdate
from lsrdecomp.lora.files.provenance import read_provenance
from lsrdecomp.lora.files.writing import weight_file
from lsrdecomp.lora.measure.ask import PROMPTS, ServerMeasurement, ask_server
from lsrdecomp.lora.measure.fidelity import Fidelity
from lsrdecomp.lora.measure.layer_differences import (
    SAME,
    LayerDifference,
    StoredUpdate,
    compare_layers,
)
from lsrdecomp.lora.measure.merged_models import MergedModel, is_model
from lsrdecomp.lora.measure.server_client import LlamaCpp, OpenAi, connect
from lsrdecomp.lora.measure.symptoms import Reason, reasons_of, where
from lsrdecomp.lora.measure.verify_files import AGREEMENT, source_names
from lsrdecomp.lora.search.layers import layer_pair
from lsrdecomp.lora.search.measured_settings import EvaluatorSettings
from lsrdecomp.lora.search.result import recorded_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

    from lsrdecomp.lora.base.base_model import Base
    from lsrdecomp.lora.base.texts import Item, Texts
    from lsrdecomp.lora.files import Checkpoint
    from lsrdecomp.lora.measure.output_meter import Meter

WHOLE = 0.99
"""Share of the effect from which an output is whole; a merge in bfloat16 keeps all but 3e-5
(``benchmarks/results/wrecks.json``)."""
ENOUGH_ANSWERS = 0.9
"""Share of whole answers that must be the LoRA's too, since a share of the effect alone flatters;
by hand."""
GONE = 0.05
"""Share of the effect below which nothing is left of a LoRA; by hand."""
N_TEXTS = 64
"""Texts that the model writes where none are given."""
VERDICTS = {
    "whole": "Whole: {other} does what {lora} does",
    "reduced": "Reduced: {other} does a part of what {lora} does",
    "damaged": "Damaged: {other} is not what {lora} should have become",
    "gone": "Gone: {other} does what the base does without {lora}",
}


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """How much of a LoRA is left in something that was made of it, and why.

    Attributes
    ----------
    lora, other : str
        The two, as they were named.
    kind : str
        What ``other`` is: ``adapter``, ``merged model`` or ``server``.
    reasons : tuple of Reason
        What was found, faults first.
    layers : tuple of LayerDifference
        The layers whose weights were compared.
    not_compared : int
        Layers of the LoRA whose weights were not.
    fidelity : Fidelity, optional
        With a base: the share of the LoRA's effect that is kept.
    server : ServerMeasurement, optional
        What a server makes of an adapter that can be switched off there.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from lsrdecomp import measure
    >>> demo = str(files("lsrdecomp.cli") / "demo_adapter")
    >>> found = measure(demo, demo)
    >>> found.verdict, found.coverage
    ('whole', '12 of 12 layers compared; 0 not')
    """

    lora: str
    other: str
    kind: str
    reasons: tuple[Reason, ...]
    layers: tuple[LayerDifference, ...] = ()
    not_compared: int = 0
    fidelity: Fidelity | None = None
    server: ServerMeasurement | None = None

    @property
    def faults(self) -> tuple[Reason, ...]:
        """The reasons that make an output damaged."""
        return tuple(reason for reason in self.reasons if reason.is_fault)

    @property
    def verdict(self) -> str:
        """``whole``, ``reduced``, ``damaged`` or ``gone``."""
        if self.fidelity is not None and self.fidelity.kept < GONE:
            return "gone"
        if self.faults:
            return "damaged"
        return "whole" if self._is_whole else "reduced"

    @property
    def _is_whole(self) -> bool:
        if self.fidelity is None:
            return self.weight_error is None or self.weight_error <= SAME
        answered = self.fidelity.answered
        return self.fidelity.kept >= WHOLE and (
            self.fidelity.n_matching >= ENOUGH_ANSWERS * answered
        )

    @property
    def weight_error(self) -> float | None:
        """‖ΔW − ΔŴ‖_F / ‖ΔW‖_F over all layers that could be compared; None without any."""
        compared = [each for each in self.layers if each.relative_error is not None]
        size = math.hypot(*(each.norm for each in compared))
        if not size:
            return None
        return math.hypot(*(each.norm * (each.relative_error or 0.0) for each in compared)) / size

    @property
    def coverage(self) -> str:
        """How many layers were compared, in words."""
        compared = sum(each.relative_error is not None for each in self.layers)
        every = len(self.layers) + self.not_compared
        return f"{compared} of {every} layers compared; {every - compared} not"

    def passed(self, at_least: float | None = None) -> bool:
        """Return whether an output has no fault, is not gone, and keeps at least a share."""
        if self.verdict in ("damaged", "gone"):
            return False
        return at_least is None or self.fidelity is None or self.fidelity.kept >= at_least

    def sentence(self) -> str:
        """Return the verdict, and what it was measured on."""
        beginning = VERDICTS[self.verdict].format(
            lora=Path(self.lora).name, other=self.other.rstrip("/").rpartition("/")[2] or self.other
        )
        if self.fidelity is not None:
            return f"{beginning}. It {self.fidelity.sentence()}."
        if self.weight_error is not None:
            return (
                f"{beginning}, judged by the weights alone: weight error {self.weight_error:.2g}. "
                "A base (--base) says what that does to the outputs."
            )
        return f"{beginning}."

    def __repr__(self) -> str:
        """Return the verdict, the reasons, and how many layers were compared."""
        reasons = [f"   {reason}" for reason in self.reasons]
        return "\n".join([self.sentence(), *reasons, f"   {self.coverage}"])

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return {
            "verdict": self.verdict,
            "sentence": self.sentence(),
            "lora": self.lora,
            "other": self.other,
            "kind": self.kind,
            "kept": None if self.fidelity is None else self.fidelity.kept,
            "weight_error": self.weight_error,
            "coverage": self.coverage,
            "reasons": [{**asdict(each), "is_fault": each.is_fault} for each in self.reasons],
            "fidelity": None if self.fidelity is None else self.fidelity.to_json(),
            "server": None if self.server is None else self.server.to_json(),
            "layers": [asdict(each) for each in self.layers],
        }


def measure(
    lora: str | Path,
    other: str | Path,
    *,
    base: str | Path | Base | nn.Module | None = None,
    data: str | Path | Texts | None = None,
    served_as: str | None = None,
    settings: EvaluatorSettings | None = None,
    on_step: OnStep | None = None,
    **options: Any,
) -> Comparison:
    """Measure how much of a LoRA is left in what was made of it.

    Parameters
    ----------
    lora : path
        The adapter as it was trained, of any format or method that is read.
    other : path or address
        What became of it: an adapter; the directory of a model that it was merged into, quantized
        or not, or its GGUF file; or the address of a running server, such as
        ``http://127.0.0.1:8080``.
    base : str, path or module, optional
        The base, as `compress` takes it. With it outputs are compared; merged models need it.
    data : path or texts, optional
        With ``base``: texts to measure on, as for `compress`, all of which are used. Answers to
        prompts with completions are also counted as right or wrong. Without any the model writes
        texts itself.
    served_as : str, optional
        Name or number of the adapter in a server that has several.
    settings : EvaluatorSettings, optional
        How texts are read.
    on_step : callable, optional
        Called with a `ProgressUpdate` before and during each part of the work.
    **options
        Fields of `EvaluatorSettings`; they win.

    Returns
    -------
    Comparison
        A verdict, reasons with codes, and the kept share.

    Raises
    ------
    CheckpointError
        If one of the two cannot be read or opened on the base.
    LsrError
        If a merged model is given without its base, a server gives no log-probabilities, or the
        LoRA has no effect on the texts.

    Notes
    -----
    On a base: three forward passes over the texts, the LoRA's own answers to at most 64 prompts,
    and two passes over these. Weights are compared one layer at a time.

    Examples
    --------
    >>> import tempfile
    >>> from importlib.resources import files
    >>> from lsrdecomp import compress, measure
    >>> demo = str(files("lsrdecomp.cli") / "demo_adapter")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     small = compress(demo, ratio=8).save(f"{folder}/small")
    ...     found = measure(demo, small)
    >>> found.verdict, [reason.code for reason in found.reasons]
    ('reduced', ['approximated', 'dropped'])
    """
    settings = (settings or EvaluatorSettings()).replace(**options)
    if base is not None:
        check_reachable(base)
    is_server = "://" in str(other)
    if base is None and data is not None and not is_server:
        raise LsrError("outputs are compared on a base: give base= (--base) with the texts")
    work = _Work(Path(lora), base, data, settings, on_step)
    if is_server:
        return work.of_server(str(other), served_as)
    if served_as is not None:
        raise LsrError("served_as= (--served-as) names an adapter of a server: give its address")
    if not Path(other).exists():
        raise CheckpointError("no such file or directory", path=other)
    if is_model(Path(other)):
        return work.of_model(Path(other))
    return work.of_adapter(Path(other))


@dataclass(frozen=True, slots=True)
class _Work:
    """What is measured against, and how."""

    lora: Path
    base: str | Path | Base | nn.Module | None
    data: str | Path | Texts | None
    settings: EvaluatorSettings
    on_step: OnStep | None

    @property
    def base_path(self) -> str | Path | None:
        """The base by name or path; None where it is open already, or there is none."""
        return self.base if isinstance(self.base, str | Path) else None

    def _adapter(self, path: Path, *, carry: bool = False) -> Checkpoint:
        """Open an adapter, beside the base where its method needs one."""
        trust = self.settings.trust_remote_code
        return open_adapter(path, self.base_path, trust_remote_code=trust, carry=carry)

    def of_adapter(self, path: Path) -> Comparison:
        """Compare with another adapter."""
        source = self._adapter(self.lora)
        try:
            other = self._adapter(path, carry=True)
        except UnsupportedError:
            if self.base is None:
                raise
            other = None  # its outputs can be compared all the same
        differences: list[LayerDifference] = []
        reasons: list[Reason] = []
        if other is not None:
            if other.format == "gguf" != source.format:
                other = self._from_gguf(other, source)
            source, other = _with_common_names(source, other)
            updates = {layer.name: _stored_update(other, layer) for layer in other.layers}
            differences = compare_layers(source, updates, on_step=self.on_step)
            differences = _as_recorded(differences, recorded_errors(other)["total"])
            reasons = [
                *self._reasons(source, updates, differences, may_lack=_may_lack(other)),
                *_unknown_layers(source, other),
                *_faults_of_extras(source, other),
            ]
        fidelity = None
        if self.base is not None and not _is_broken(reasons):
            try:
                fidelity = self._fidelity(source, path, other)
            except CheckpointError as error:
                if not any(reason.is_fault for reason in reasons):
                    raise
                reasons.append(Reason("not-opened", error.message))
        return Comparison(
            str(self.lora),
            str(path),
            "adapter",
            tuple(reasons),
            tuple(differences),
            len(source.layers) - len(differences),
            fidelity,
        )

    def _from_gguf(self, other: Checkpoint, source: Checkpoint) -> Checkpoint:
        """Return a LoRA of llama.cpp by the names and the order of rows of the base."""
        if self.base_path is None:
            raise CheckpointError(
                "has the names of llama.cpp, and its order of rows, which the base tells: give it "
                "by name or directory (--base, base=)",
                path=other.path,
            )
        base = read_base(reachable_base(self.base_path))
        return in_module_names(other, [layer.name for layer in source.layers], base)

    def of_model(self, path: Path) -> Comparison:
        """Compare with a model that the LoRA was merged into."""
        if self.base is None:
            raise LsrError(
                f"{path} is a whole model: give the base that it was merged into (--base, base=)"
            )
        source = self._adapter(self.lora)
        differences: list[LayerDifference] = []
        reasons: list[Reason] = []
        if self.base_path is not None:
            model = MergedModel.open(path, self.base_path, source)
            updates = model.updates(source)
            stored = [layer for layer in source.layers if layer.name in updates]
            compared = replace(source, layers=tuple(stored))
            differences = compare_layers(compared, updates, on_step=self.on_step)
            trust = self.settings.trust_remote_code
            reasons = model.faults_beside(source, trust_remote_code=trust)
            if all(reason.code != "base" for reason in reasons):
                reasons += self._reasons(compared, updates, differences, storage=model.storage)
        fidelity = None
        if not _is_broken(reasons):
            fidelity = self._fidelity(source, path, None, is_merged=True)
        return Comparison(
            str(self.lora),
            str(path),
            "merged model",
            tuple(sorted(reasons, key=lambda reason: not reason.is_fault)),
            tuple(differences),
            len(source.layers) - len(differences),
            fidelity,
        )

    def of_server(self, url: str, served_as: str | None) -> Comparison:
        """Compare with what a running server answers."""
        # 1. Which server it is, and whether the adapter acts there.
        if not self.lora.exists():
            raise CheckpointError("no such file or directory", path=self.lora)
        client = connect(url, served_as, self.lora, needs_base=self.base is None)
        server = None
        if isinstance(client, LlamaCpp) or client.base:
            prompts = (
                {} if self.data is None else {"prompts": _beginnings(self.data)[: len(PROMPTS)]}
            )
            server = ask_server(
                url,
                self.lora,
                name=served_as,
                base=self.base_path,
                dtype=self.settings.dtype,
                trust_remote_code=self.settings.trust_remote_code,
                **prompts,
            )
        reasons = []
        if server is not None and not server.acts:
            reasons.append(Reason("not-acting", "the adapter changes nothing there"))
        elif server is not None and server.scaled_right is False:
            sentence = f"it acts at {server.fitted_scale:.3g} times its ΔW"
            reasons.append(Reason("scale", sentence))
        # 2. With a base, its next tokens and whole answers beside the LoRA's.
        fidelity = None
        if self.base is not None:
            fidelity = self._served_fidelity(client)
        return Comparison(
            str(self.lora), url, "server", tuple(reasons), fidelity=fidelity, server=server
        )

    def _served_fidelity(self, client: LlamaCpp | OpenAi) -> Fidelity:
        """Ask a server about the texts, beside the base with the LoRA."""
        with needs("a base", "peft"):
            from lsrdecomp.lora.measure.served_outputs import ServedOutputs
        source = self._adapter(self.lora)
        with self._opened(source, self.lora) as (_, opened):
            meter, written = self._meter(opened)
            served = ServedOutputs(client, meter, self.on_step)
            behaviour = served.compare()
            self._announce("comparing whole answers")
            matches = served.whole_answers()
        return Fidelity.of(
            behaviour,
            data=data_name(self.data),
            base=Path(model_name(opened)).name,
            bytes_before=bytes_to_open(source.weights),
            bytes_after=0,
            **asdict(matches),
            kind=kind_of(meter.texts),
            written=written,
        )

    @contextmanager
    def _opened(self, source: Checkpoint, config: Path) -> Iterator[tuple[Base, Base]]:
        """Open the base, and the base with the LoRA; ``config`` says for which task."""
        self._announce("opening the base")
        with needs("a base", "peft"):
            from lsrdecomp.lora.base.open_bases import open_base
        settings = self.settings
        assert self.base is not None
        device = settings.device or "cpu"
        plain = open_base(
            self.base,
            config,
            dtype=settings.dtype,
            device=device,
            trust_remote_code=settings.trust_remote_code,
        )
        with TemporaryDirectory() as folder:
            path = _opened_by_peft(plain, self.lora, source, Path(folder) / "lora")
            yield plain, plain.with_adapter(path)

    def _reasons(
        self,
        source: Checkpoint,
        updates: Mapping[str, StoredUpdate],
        differences: list[LayerDifference],
        *,
        storage: str = "",
        may_lack: Callable[[str], bool] = lambda _name: False,
    ) -> list[Reason]:
        """Return what layers look like; of a DoRA also whether only its magnitudes are missing."""
        found = reasons_of(
            differences, source, merged=bool(storage), storage=storage, may_lack=may_lack
        )
        if source.config.get("use_dora") and any(each.code != "same" for each in differences):
            pairs = _without_magnitudes(self.lora)
            names = [layer.name for layer in pairs.layers]
            without = compare_layers(pairs, updates)
            if all(each.code in ("same", "rounded") for each in without):
                place = where(names, names)
                sentence = f"{place} have the low-rank pair of DoRA without its magnitudes"
                return [Reason("magnitudes", sentence, tuple(names))]
        return found

    def _fidelity(
        self, source: Checkpoint, path: Path, other: Checkpoint | None, *, is_merged: bool = False
    ) -> Fidelity:
        """Run the base with the LoRA, and what it is compared with."""
        with needs("a base", "peft"):
            from lsrdecomp.lora.measure.output_meter import open_model
        config = self.lora if (self.lora / CONFIG).is_file() or other is None else path
        with self._opened(source, config) as (plain, opened), TemporaryDirectory() as folder:
            meter, written = self._meter(opened)
            if is_merged:
                compared = open_model(path, plain, self.settings.dtype)
            else:
                copy = _opened_by_peft(plain, path, other or source, Path(folder) / "other")
                compared = plain.with_adapter(copy)
            self._announce("comparing outputs")
            behaviour = meter.compare(compared)
            self._announce("comparing whole answers")
            matches = meter.whole_answers(compared)
        if written is not None:
            behaviour = replace(behaviour, right=None)
        size = sum(file.stat().st_size for file in _files_of(path)) if is_merged else 0
        return Fidelity.of(
            behaviour,
            data=data_name(self.data),
            base=Path(model_name(plain)).name,
            bytes_before=bytes_to_open(source.weights),
            bytes_after=size or bytes_to_open(_weights_of(path, other)),
            **asdict(matches),
            kind=kind_of(meter.texts),
            written=written,
        )

    def _meter(self, source: Base) -> tuple[Meter, str | None]:
        """Return the LoRA's outputs on the texts, and what those are called if it wrote them."""
        from lsrdecomp.lora.base.written_texts import kind_of_written, write_texts
        from lsrdecomp.lora.measure.output_meter import Meter

        written = None
        texts: list[Item]
        if self.data is not None or source.batches is not None:
            texts = data_for(self.base, self.data)
        else:
            written = kind_of_written(source, ())
            texts = write_texts(
                source,
                seed=self.settings.seed,
                count=N_TEXTS,
                max_length=self.settings.max_length,
                on_step=self.on_step,
            )
        self._announce(f"the LoRA's own answers to {len(texts)} examples")
        return Meter(source, texts, self.settings), written

    def _announce(self, stage: str) -> None:
        if self.on_step is not None:
            self.on_step(ProgressUpdate(stage, 0, 0, ""))


def _without_magnitudes(adapter: Path) -> Checkpoint:
    """Return the plain LoRA that a DoRA is without its magnitudes."""
    bundle = open_bundle(adapter)
    tensors = {key: tensor for key, tensor in bundle.tensors.items() if "lora_magnitude" not in key}
    plain = replace(bundle, tensors=tensors, config={**(bundle.config or {}), "use_dora": False})
    return next(each for each in FORMATS if each.matches(plain)).read(plain)


def _is_broken(reasons: list[Reason]) -> bool:
    """Return whether outputs would be no numbers, or cannot be had."""
    return any(reason.code in ("not-finite", "size") for reason in reasons)


def _with_common_names(source: Checkpoint, other: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Return both with the source's names of layers, where the other's are those of a program."""
    if {layer.name for layer in other.layers} - {layer.name for layer in source.layers}:
        source = in_diffusers_names(source)
        other = in_diffusers_names(other, known={layer.name for layer in source.layers})
    names = source_names(source, other)
    layers = tuple(replace(layer, name=names.get(layer.name, layer.name)) for layer in other.layers)
    return source, replace(other, layers=layers)


def _stored_update(other: Checkpoint, layer: Any) -> StoredUpdate:
    return StoredUpdate(lambda: layer_pair(other, layer))


def _may_lack(other: Checkpoint) -> Callable[[str], bool]:
    """Return whether the other's writer left a layer out, by its name."""
    dropped = read_provenance(other).get("dropped")
    names = set(map(str, dropped)) if isinstance(dropped, list) else set()
    return lambda name: other.format == "lsr" or name in names


def _as_recorded(
    differences: list[LayerDifference], recorded: float | None
) -> list[LayerDifference]:
    """Return layers that look like another adapter's as approximated, if their error is on record.

    A layer that was trained to few numbers may have nothing in common with ΔW but what it does. If
    the relative error over all layers is the recorded one, they are as they were written.
    """
    errors = [(each.relative_error or 0.0) * each.norm for each in differences]
    total = math.hypot(*errors) / (math.hypot(*(each.norm for each in differences)) or 1.0)
    if recorded is None or not math.isclose(total, recorded, rel_tol=AGREEMENT):
        return differences
    return [
        replace(each, code="approximated") if each.code == "unrelated" else each
        for each in differences
    ]


def _unknown_layers(source: Checkpoint, other: Checkpoint) -> list[Reason]:
    """Return a reason for layers that the LoRA has not, unless they are zero."""
    known = {layer.name for layer in source.layers}
    unknown = [layer for layer in other.layers if layer.name not in known]
    names = [layer.name for layer in unknown if layer_pair(other, layer).norm > 0.0]
    if not names:
        return []
    sentence = f"{len(names)} layers are not in the LoRA, the first {names[0]}"
    return [Reason("unknown", sentence, tuple(names))]


def _faults_of_extras(source: Checkpoint, other: Checkpoint) -> list[Reason]:
    """Return a reason for tensors beside the layers that are not the source's."""
    names = []
    for name in sorted(source.extras.keys() | other.extras.keys()):
        before, after = source.extras.get(name), other.extras.get(name)
        if before is None or after is None or before.shape != after.shape:
            names.append(name)
            continue
        first, second = before.load(double=True), after.load(double=True)
        if np.linalg.norm(first - second) > SAME * np.linalg.norm(first):
            names.append(name)
    if not names:
        return []
    verb = "is" if len(names) == 1 else "are"
    sentence = f"{', '.join(names[:3])} {verb} missing, or not as in the LoRA"
    return [Reason("heads", sentence, tuple(names))]


def _opened_by_peft(plain: Base, path: Path, adapter: Checkpoint, out: Path) -> Path:
    """Return a directory that PEFT opens on a base: the adapter's, or a copy of other formats."""
    if (path / CONFIG).is_file() or plain.module_names is not None:
        return path
    names = sorted(layer.name for layer in adapter.layers)
    config = {"peft_type": "LORA", "target_modules": names}
    copied = replace(adapter, config=config, extras={}, carried={})

    def pairs() -> Any:
        for layer in adapter.layers:
            pair = layer_pair(adapter, layer)
            yield layer.name, pair.left, pair.right

    return write_lora(out, layers=pairs(), source=copied)


def _weights_of(path: Path, other: Checkpoint | None) -> Path:
    """Return the weight file of another adapter, also of one that only PEFT opens."""
    return weight_file(path) if other is None else other.weights


def _files_of(model: Path) -> list[Path]:
    """Return the files of a model's weights."""
    if model.is_file():
        return [model]
    return weight_files(model) or sorted(model.glob("*.bin")) or sorted(model.glob("*.gguf"))


def _beginnings(data: Any) -> list[str]:
    """Return the prompts of texts, as a server is asked them."""
    from lsrdecomp.lora.base.dataset import PromptExample

    texts = []
    for item in data_for(None, data):
        if isinstance(item, PromptExample):
            texts.append(item.prompt or item.completion)
        elif isinstance(item, tuple):
            texts.append(item[0])
    return texts
