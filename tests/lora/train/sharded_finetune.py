"""`finetune` under accelerate's FSDP on CPUs: SETTINGS.json OUT [KILL_AT].

Accelerate shards on accelerators alone and turns to DDP on CPUs, though all it calls works there
too. Here it is told that several CPUs are to be sharded over as several GPUs are. After step
KILL_AT the first process kills itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from lsrdecomp.lora.files.progress import ProgressUpdate
from lsrdecomp.lora.train.finetune_run import finetune
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings

plain = AcceleratorState.__init__


def with_sharding(
    self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any
) -> None:
    plain(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        PartialState._shared_state["distributed_type"] = self.distributed_type


def main(settings: str, out: str, kill_at: str = "0") -> None:
    def on_step(step: ProgressUpdate) -> None:
        if step.done == int(kill_at):
            os.kill(os.getpid(), signal.SIGKILL)

    AcceleratorState.__init__ = with_sharding
    finetune(
        FinetuneSettings.from_mapping(json.loads(Path(settings).read_text())), out, on_step=on_step
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
