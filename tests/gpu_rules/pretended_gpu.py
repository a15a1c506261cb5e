"""A GPU without a GPU: its tensors lie on the CPU, and keep the rules of CUDA's.

Inside `pretended_gpu` torch has a device named ``pretended``. Its tensors refuse to meet those of
the CPU, and refuse NumPy; where the CPU waits for the device is counted, with the line that
waits. Kernels, memory and speed are those of the CPU: nothing is tested of them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretended"
PACKAGE = "/lsrdecomp/"

OTHERS = ("accelerate/", "peft/", "safetensors/", "transformers/", "trl/")

WAITING = {
    "_linalg_check_errors",
    "_local_scalar_dense",
    "_unique2",
    "equal",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
}
"""Operations whose results the CPU reads, or whose outputs have sizes that only the GPU knows."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operations that take indices of the CPU beside a tensor of the GPU."""
COPYING = {"_to_copy", "copy_"}
"""Operations from one device to another."""


class _Device:
    """What torch asks of the module of a device, and whether there is one at present."""

    is_on = False

    def is_available(self) -> bool:
        return self.is_on

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return int(self.is_on)

    def current_device(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def _is_in_bad_fork(self) -> bool:
        return False

    # What is drawn on the device comes from the generator of the CPU, which has its own state.

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass


class _Hook(torch._C._acc.PrivateUse1Hooks):
    """What torch's C++ asks of the device."""

    def is_available(self) -> bool:
        return DEVICE.is_on

    def has_primary_context(self, device_index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


DEVICE = _Device()
HOOK = _Hook()
_setup_privateuseone_for_python_backend(NAME, backend_module=DEVICE, hook=HOOK)


class GpuTensor(torch.Tensor):
    """A tensor on the device; ``host`` is the tensor of the CPU that holds its numbers."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> Self:
        tensor: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
        )
        tensor.host = host
        return tensor

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({self.host!r})"

    @property
    def data(self) -> Tensor:
        """The same numbers outside of every graph."""
        return self.detach()

    @data.setter
    def data(self, value: GpuTensor) -> None:
        self.host = value.host
        torch.Tensor.data.__set__(self, value)

    def numpy(self, **_: Any) -> Any:
        """Refuse, as a tensor of a GPU does."""
        raise TypeError("can't convert a tensor of the device to numpy; use Tensor.cpu() first")

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Refuse too."""
        return self.numpy()

    def untyped_storage(self) -> Any:
        """Return that of the host, by which tensors that share numbers are known."""
        return self.host.untyped_storage()

    def tolist(self) -> Any:
        """Return the numbers, for which the CPU waits."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise: inside of `pretended_gpu` `PretendedGpu` takes every operation."""
        raise RuntimeError(f"{function} on the device, outside of pretended_gpu()")


def _empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> GpuTensor:
    """Return a new tensor on the device."""
    return GpuTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy numbers to the device."""
    _host(target).copy_(_host(source))
    return target


# `torch.tensor` makes an empty one below all modes. The kernels live as long as the library.
LIBRARY = torch.library.Library("aten", "IMPL")
LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")


class PretendedGpu(TorchDispatchMode):
    """Runs the operations of the device on the CPU, and counts those that the CPU waits for.

    Attributes
    ----------
    waits : Counter of str
        How often the CPU waited, by operation and line of the package.
    operations : Counter of str
        Operations on the device, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()

    @property
    def own_waits(self) -> dict[str, int]:
        """How often this package waited, not one that it calls, by operation and file."""
        found: Counter[str] = Counter()
        for wait, count in self.waits.items():
            operation, _, place = wait.partition(" at ")
            if not place.startswith(("a test", *OTHERS)):
                found[f"{operation} at {place.partition(':')[0]}"] += count
        return dict(found)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation; raise if its tensors lie on two devices."""
        kwargs = dict(kwargs or {})
        name = function._schema.name.removeprefix("aten::")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_gpu = [tensor for tensor in tensors if isinstance(tensor, GpuTensor)]
        target = kwargs.get("device")
        to_gpu = bool(on_gpu) if target is None else torch.device(target).type == NAME
        if not on_gpu and not to_gpu:
            return function(*args, **kwargs)
        # 1. Keep the rules of a GPU.
        if on_gpu and name not in COPYING:
            _check_devices(name, tensors, args)
        if on_gpu and _waits(name, args, kwargs, to_gpu=to_gpu):
            self.waits[f"{name} at {_place()}"] += 1
        self.operations[name] += 1
        # 2. Run the operation on the CPU.
        if target is not None:
            kwargs["device"] = torch.device("cpu") if to_gpu else target
        result = function(*tree_map(_host, args), **tree_map(_host, kwargs))
        if name == "copy_":
            return args[0]
        if torch.Tag.inplace_view in function.tags:  # such as squeeze_: a tensor has another shape
            with no_dispatch():
                function(*args, **kwargs)
            return args[0]
        if not to_gpu:
            return result
        # 3. The result is on the device. What was written in place is the tensor that was given.
        given = {id(tensor.host): tensor for tensor in on_gpu}

        def on_device(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return given[id(value)] if id(value) in given else GpuTensor(value)

        return tree_map(on_device, result)


def _host(value: Any) -> Any:
    """Return the tensor of the CPU that a tensor of the device is; other values as they are."""
    return value.host if isinstance(value, GpuTensor) else value


def _check_devices(name: str, tensors: list[Tensor], args: Any) -> None:
    """Raise if a tensor of the CPU is among those of an operation; numbers without axes may be."""
    if name in INDEXING and isinstance(args[0], GpuTensor):
        return
    for tensor in tensors:
        if not isinstance(tensor, GpuTensor) and tensor.ndim > 0:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{NAME}:0 and cpu, in {name} at {_place()}"
            )


def _waits(name: str, args: Any, kwargs: Any, *, to_gpu: bool) -> bool:
    """Return whether the CPU waits for an operation on tensors of the device."""
    if name == "copy_":
        return not isinstance(args[0], GpuTensor)
    if name in INDEXING:  # a mask becomes indices, as many as it has ones
        masks = [index for index in args[1] if isinstance(index, GpuTensor)]
        return any(mask.dtype == torch.bool for mask in masks)
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    return name in WAITING or not to_gpu


def _place() -> str:
    """Return the file and line from which an operation was called, torch's own files aside."""
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and "/torch/" not in name:
            for folder in ("/site-packages/", PACKAGE):
                if folder in name:
                    return f"{name.rpartition(folder)[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "a test"


@contextmanager
def pretended_gpu() -> Iterator[PretendedGpu]:
    """Let torch have the device inside a ``with`` block, and yield the counts of its operations."""
    DEVICE.is_on = True
    try:
        # Backward passes run in this thread, as all that is counted does.
        with PretendedGpu() as gpu, torch.autograd.set_multithreading_enabled(False):
            yield gpu
    finally:
        DEVICE.is_on = False
