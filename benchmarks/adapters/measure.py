"""Measuring side by side: interleaved rounds, CPU or GPU time, kernels launched, memory kept for backward."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.adapters.arms import Prepared

FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "_unsafe_view",
    "lift_fresh", "_local_scalar_dense",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm on one problem; times are medians over rounds of seconds a call."""

    arm: str
    forward: float
    forward_backward: float
    step: float
    ratio: float  # of forward_backward to the yardstick's in the same round, median over rounds
    ratio_low: float  # quartiles over rounds
    ratio_high: float
    rounds: list[float]  # forward_backward of every round
    kernels: int  # of forward and backward
    extra_kernels: int  # beyond the frozen layers
    kept_mb: float  # saved by autograd between forward and backward, beyond parameters
    peak_mb: float | None  # on a GPU: allocated at most during a step, model included
    device_time: float | None  # on a GPU: seconds in kernels of forward and backward, without gaps between launches
    parameters: int

    def record(self) -> dict[str, Any]:
        return asdict(self)


class CountKernels(TorchDispatchMode):
    """Counts operations that compute: neither views nor bare allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [each.alias_info for each in func._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in aliases)
        if not view and func.overloadpacket.__name__ not in FREE:
            self.count += 1
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class Subject:
    """A prepared arm with its inputs and output gradients, and how to run it."""

    name: str
    prepared: Prepared
    inputs: Any
    gradients: Sequence[Tensor]
    optimizer: torch.optim.Optimizer | None

    def forward(self) -> None:
        with torch.no_grad():
            self.prepared.run(self.inputs)

    def forward_backward(self) -> None:
        for parameter in self.prepared.parameters:
            parameter.grad = None
        torch.autograd.backward(self.prepared.run(self.inputs), self.gradients)

    def step(self) -> None:
        self.forward_backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()


def seconds(call: Callable[[], None], device: torch.device, calls: int = 1) -> float:
    """Time of one call: of this process's CPU, or of the GPU between two events."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / calls
    begun = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - begun) / calls


def kernels(call: Callable[[], None], device: torch.device) -> tuple[int, float | None]:
    """Kernels launched and, on a GPU, the seconds that they ran."""
    if device.type == "cuda":
        call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        events = [event for event in profile.key_averages() if event.device_type.name == "CUDA"]
        return sum(event.count for event in events), sum(event.self_device_time_total for event in events) / 1e6
    with CountKernels() as counted:
        call()
    return counted.count, None


def kept_bytes(subject: Subject) -> int:
    """Bytes of distinct storages that autograd keeps for backward, parameters and inputs left out."""
    known = {parameter.untyped_storage().data_ptr() for parameter in subject.prepared.model.parameters()}
    known |= {tensor.untyped_storage().data_ptr() for tensor in subject.inputs if isinstance(tensor, Tensor)}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = subject.prepared.run(subject.inputs)
    total = sum(sizes.values())
    torch.autograd.backward(outputs, subject.gradients)
    return total


def measure(
    subjects: Sequence[Subject], device: torch.device, *, rounds: int, yardstick: str, frozen: str, deadline: float
) -> list[Figures]:
    """All subjects, round by round in alternating order, so that what else the machine does falls on all alike."""
    calls = {subject.name: 1 for subject in subjects}
    for subject in subjects:
        subject.step()
        once = seconds(subject.step, device)
        calls[subject.name] = max(1, min(50, round((0.1 if device.type == "cuda" else 0.05) / max(once, 1e-6))))
    times: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    others: dict[str, list[tuple[float, ...]]] = {subject.name: [] for subject in subjects}
    for number in range(rounds):
        if number > 2 and time.monotonic() > deadline:
            break
        for subject in subjects if number % 2 == 0 else list(reversed(subjects)):
            repeats = calls[subject.name]
            times[subject.name].append(seconds(subject.forward_backward, device, repeats))
            if number % 3 == 0:
                others[subject.name].append(tuple(seconds(k, device, repeats) for k in (subject.forward, subject.step)))
    launched = {subject.name: kernels(subject.forward_backward, device) for subject in subjects}
    result = []
    for subject in subjects:
        own = times[subject.name]
        low, middle, high = quartiles(own, times[yardstick])
        rare = others[subject.name]
        result.append(
            Figures(
                arm=subject.name,
                forward=statistics.median(each[0] for each in rare),
                forward_backward=statistics.median(own),
                step=statistics.median(each[1] for each in rare),
                ratio=middle,
                ratio_low=low,
                ratio_high=high,
                rounds=own,
                kernels=launched[subject.name][0],
                extra_kernels=launched[subject.name][0] - launched[frozen][0],
                kept_mb=kept_bytes(subject) / 2**20,
                peak_mb=_peak(subject, device),
                device_time=launched[subject.name][1],
                parameters=sum(p.numel() for p in subject.prepared.parameters),
            )
        )
    return result


def quartiles(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile over rounds of the ratio within a round."""
    ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
    return ratios[len(ratios) // 4], statistics.median(ratios), ratios[-1 - len(ratios) // 4]


def _peak(subject: Subject, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()  # other arms are alive: count from here, and add this arm's own weights
    torch.cuda.reset_peak_memory_stats()
    subject.step()
    own = sum(parameter.numel() * parameter.element_size() for parameter in subject.prepared.model.parameters())
    return float(torch.cuda.max_memory_allocated() - before + own) / 2**20
