"""The model card's part about this library: the import a reader needs, the sizes, and where the adapter came from."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

HEADING = "## Loading this adapter"
TEMPLATE = """\
{heading}

PEFT knows `peft_type: {kind}` once this line has run (`pip install "lsrdecomp[peft]"`):

```python
import lsrdecomp.adapters
```

Then `PeftModel.from_pretrained(base_model, "<this folder>")` works as usual; pass `is_trainable=True` to train on.

{facts}
"""


def write_card(
    folder: str | Path,
    kind: str,
    *,
    source: str | None = None,
    source_sha256: str | None = None,
    errors: Mapping[str, float] | None = None,
) -> None:
    """Put our section into the README.md of a saved adapter, in place of an earlier one.

    Parameters
    ----------
    folder : path
        A folder with ``adapter_model.safetensors``.
    kind : str
        PEFT type, such as ``"LSR"``.
    source, source_sha256 : str, optional
        Name and hash of the adapter that this one was made from.
    errors : mapping of str to float, optional
        Relative Frobenius error of each layer's ΔW against the source.
    """
    folder = Path(folder)
    facts = size_facts(folder / "adapter_model.safetensors", f"{kind.lower()}_")
    if source is not None:
        facts.append(f"- made from `{source}`" + (f" (sha256 `{source_sha256}`)" if source_sha256 else ""))
    if errors:
        facts.append("\n| layer | relative error of ΔW |\n|---|---|")
        facts += [f"| `{name}` | {error:.2e} |" for name, error in errors.items()]
    section = TEMPLATE.format(heading=HEADING, kind=kind, facts="\n".join(facts))
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    # The earlier section ends where the next heading of its level begins.
    text = re.sub(rf"{re.escape(HEADING)}\n.*?(?=^#{{1,2}} |\Z)", "", text, flags=re.DOTALL | re.MULTILINE)
    path.write_text(f"{text.rstrip()}\n\n{section}" if text.strip() else section, encoding="utf-8")


def size_facts(path: Path, prefix: str) -> list[str]:
    """How many numbers the adapter holds, in how many layers and bytes."""
    numbers, layers = 0, set()
    with safe_open(path, framework="numpy") as file:
        for key in file.keys():  # noqa: SIM118 the file handle is no mapping
            module, separator, _ = key.partition(f".{prefix}")
            if separator:
                numbers += math.prod(file.get_slice(key).get_shape())
                layers.add(module)
    return [f"- {numbers:,} adapter parameters in {len(layers)} layers, {path.stat().st_size:,} bytes"]
