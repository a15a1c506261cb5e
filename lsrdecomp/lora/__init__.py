"""LoRA adapters: read, measured, made smaller, trained further. The second half of the package.

`files`
    adapters on disk, every format in and out
`peft`
    LSR as a method of PEFT: ``import lsrdecomp.lora.peft``; needs torch and PEFT
`base`
    a base model and what it does: opened, run, its statistics; needs torch
`search`
    candidates for every layer, and their choice under one budget
`measure`
    how much of a LoRA is left: in files, at a server and, with torch, on a base
`train`
    runs that train: on examples, or on the LoRA's own answers; needs torch
`compress`
    from a LoRA to a smaller one: goals, sizes, the original format, export, reports
`fleet`
    many adapters under one plan

Nothing of the first half (`kronecker` to `plots`) imports anything from here.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
