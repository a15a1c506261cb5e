"""`lsrdecomp.distill`: train a compressed adapter, without labels, on the outputs of its LoRA.

Torch is loaded when it is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import needs
from lsrdecomp.fields import refuses_unknown
from lsrdecomp.lora.base.any_adapter import open_adapter
from lsrdecomp.lora.base.base_files import check_reachable
from lsrdecomp.lora.compress.distill_settings import DistillSettings
from lsrdecomp.lora.compress.rewrite import publish
from lsrdecomp.lora.files import Journal, check_output_directory, content_key, open_checkpoint
from lsrdecomp.lora.files.file_checks import read_json
from lsrdecomp.lora.files.provenance import REPORT
from lsrdecomp.lora.files.statistics import read_statistics
from lsrdecomp.lora.measure.verify_files import check_layers

if TYPE_CHECKING:
    from lsrdecomp.lora.base.texts import Texts
    from lsrdecomp.lora.compress.variants import DistilledVariant
    from lsrdecomp.lora.files.progress import OnStep
    from lsrdecomp.lora.measure.fidelity import Fidelity


@dataclass(frozen=True, slots=True, repr=False)
class Distilled:
    """A distilled adapter: its directory, its fidelity, and the variant before and after.

    Examples
    --------
    >>> from lsrdecomp.lora.base import Behaviour
    >>> from lsrdecomp.lora.measure import Fidelity
    >>> from lsrdecomp.lora.compress.variants import DistilledVariant
    >>> before = Behaviour(96, 1_895, "token", 0.24, 0.86, 1.36)
    >>> after = Behaviour(96, 1_895, "token", 0.022, 0.95, 1.36)
    >>> files = {"bytes_before": 3_700_000, "bytes_after": 39_000}
    >>> fidelity = Fidelity.of(after, data="e2e.jsonl", base="base", **files)
    >>> variant = DistilledVariant(Path("was"), Path("small"), before, after, None)
    >>> Distilled(Path("small"), fidelity, variant)
    Distilled small, which kept 82.4 %
       Measured: keeps 98.4 % of the LoRA's effect on 96 held-out texts of e2e.jsonl
       KL to the LoRA 0.022 nats per token, 1.36 without an adapter; top prediction agrees on 95 %
       files 3.7 MB → 39 kB
    """

    directory: Path
    fidelity: Fidelity
    variant: DistilledVariant

    def __repr__(self) -> str:
        """Return directory, share kept before, and fidelity."""
        share = self.variant.before.kept
        before = "" if share is None else f", which kept {100 * share:.1f} %"
        lines = [f"   {line.strip()}" for line in repr(self.fidelity).split("\n")]
        return "\n".join([f"Distilled {self.directory}{before}", *lines])

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return {
            "directory": str(self.directory),
            "promise": self.fidelity.to_json(),
            "distillation": self.variant.to_json(),
        }


@partial(refuses_unknown, settings=DistillSettings)
def distill(
    directory: str | Path,
    *,
    base: str | Path,
    data: str | Path | Texts | None = None,
    teacher: str | Path,
    out: str | Path | None = None,
    force: bool = False,
    steps: int | None = None,
    learning_rate: float | None = None,
    settings: DistillSettings | None = None,
    seed: int | None = None,
    device: str | None = None,
    on_step: OnStep | None = None,
) -> Distilled:
    """Train a compressed adapter on its LoRA's outputs, and write the better of old and new.

    Outputs are logits and, of a classifier, features; see
    `lsrdecomp.lora.train.distillation.distill_factors`.

    Parameters
    ----------
    directory : path
        A directory that `compress` wrote.
    base : str or path
        The base model, by name or directory.
    data : path or sequence of texts, optional
        Texts of the task, without labels: a file with a text a line, or as for `read_data`. If they
        are too few the model writes texts itself.
    teacher : path
        The LoRA that ``directory`` was made from, a PEFT directory.
    out : path, optional
        Directory to write to; absent, ``directory`` is replaced.
    force : bool
        Replace ``out`` if it exists.
    steps : int, optional
        Maximum steps, including the learning-rate search; absent, 200.
    learning_rate : float, optional
        Learning rate, a relative change per step; absent, found by trials.
    settings : DistillSettings, optional
        How texts are read and held out, and all else. An argument here of the same name wins.
    seed : int, optional
        Seed of the order of the texts, and of which are held out; absent, 0.
    device : str, optional
        Where the base runs; absent, the CPU.
    on_step : callable, optional
        Called with a `ProgressUpdate` before each part of the work and after every step of
        training.

    Returns
    -------
    Distilled
        The directory, and the fidelity of what was written, measured on texts that training did not
        see.

    Raises
    ------
    CheckpointError
        If directory, teacher and base do not belong together.
    LsrError
        If texts are too few, or the LoRA has no effect on them; if torch, transformers or peft are
        missing.

    Notes
    -----
    The output is written at the end, in one step. Until then the journal beside it has the state of
    training, from which the same call resumes a killed one. Started by ``accelerate launch`` on
    several devices, processes share the examples of each step (``micro`` at a time), and the first
    one writes.
    """
    given = {"steps": steps, "learning_rate": learning_rate, "seed": seed, "device": device}
    given = {name: value for name, value in given.items() if value is not None}
    options = (settings or DistillSettings()).replace(**given)
    check_reachable(base)
    with needs("distillation", "peft"):
        from accelerate import PartialState

        from lsrdecomp.lora.base.texts import data_name, few_texts, read_data
        from lsrdecomp.lora.compress.variants import distill_variant
        from lsrdecomp.lora.measure.evaluator import Evaluator
    # 1. Open what is given, and check it before work is done.
    directory = Path(directory)
    source = open_adapter(teacher, base, trust_remote_code=options.trust_remote_code)
    compressed = open_checkpoint(directory)
    check_layers(compressed, source)
    replaces = force or out is None
    out = directory if out is None else Path(out)
    read = [source.path, *_paths(data, options.statistics)]
    check_output_directory(out, read, replaces)
    texts = read_data(data)
    statistics = None
    if options.statistics is not None:
        statistics = read_statistics(options.statistics)
        statistics.check_base(source.config.get("base_model_name_or_path"))
    # 2. Open the base with the LoRA on it, on the device of this process.
    processes = PartialState(cpu=options.device in (None, "cpu"))
    if options.device == "cuda" and processes.num_processes > 1:
        options = options.replace(device=str(processes.device))
    journal = Journal.beside(out, reads_only=not processes.is_main_process)
    with journal, TemporaryDirectory() as folder:
        evaluator = Evaluator(
            base,
            source.path,
            texts,
            options,
            trains=few_texts(texts),
            journal=journal,
            on_step=on_step,
        )
        # 3. Train, and measure what the new numbers keep as written.
        evaluator.announce("measuring")
        variant = distill_variant(
            evaluator,
            directory,
            source,
            Path(folder) / "trained",
            evaluator.distillation_data(options.steps, options.micro),
            steps=options.steps,
            before=evaluator.measure(directory),
            rate=options.learning_rate,
            journal=journal,
            key=content_key(
                evaluator.key, compressed.source_sha256, options.steps, options.learning_rate
            ),
            statistics=statistics,
        )
        # 4. Write the better of the two variants, with its fidelity.
        fidelity = evaluator.fidelity(
            variant.behaviour, variant.path, source, data_name(data), distilled=variant.steps
        )
        if processes.is_main_process:
            record = variant.path / REPORT
            report = dict(read_json(record)) if record.is_file() else {}
            report["distillation"] = variant.to_json()
            publish(variant.path, out, report, fidelity, inputs=read, force=replaces)
        processes.wait_for_everyone()
    return Distilled(out, fidelity, variant)


def _paths(*given: Any) -> list[Path]:
    """Return those of the arguments that are paths."""
    return [Path(value) for value in given if isinstance(value, str | Path)]
