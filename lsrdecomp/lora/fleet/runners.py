"""Where the jobs of a fleet run: processes of this host, or the workers of a Ray cluster."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

from lsrdecomp.arrays import check_device
from lsrdecomp.errors import LsrError, needs
from lsrdecomp.lora.fleet.fleet_run import Job, Runner, run_job
from lsrdecomp.lora.fleet.manifest import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lsrdecomp.lora.search.plan import CompressionPlan


ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def joblib_runner(workers: int = -1, device: str | None = None, per_gpu: int = 1) -> Runner:
    """Return a runner in processes of this host, through joblib.

    Each has one linear-algebra thread, so that the bytes do not depend on their number.

    Parameters
    ----------
    workers : int
        Processes; −1 for as many as there are processors, or GPUs times ``per_gpu`` if they are
        asked for.
    device : str, optional
        As for `lsrdecomp.compress`. With ``"cuda"`` the jobs take the GPUs of this host in turn.
    per_gpu : int
        Processes that share a GPU.

    Returns
    -------
    callable
        A `Runner` for `run_fleet`.

    Raises
    ------
    LsrError
        If torch cannot compute in float64 on ``device``, or ``per_gpu`` is given without cuda.

    Examples
    --------
    >>> runner = joblib_runner(workers=2)  # for `run_fleet`, which shows it at work
    >>> callable(runner)
    True
    """
    _check_per_gpu(per_gpu, device)
    workers, devices = _devices(workers, device, per_gpu)

    def run(jobs: Sequence[Job], plan: CompressionPlan) -> Iterator[Outcome]:
        with needs("a fleet", "fleet"):
            from joblib import Parallel, delayed, parallel_config
            from joblib.externals.loky.process_executor import BrokenProcessPool
        unfinished = {job.name for job in jobs}
        placed = [
            replace(job, device=device) for job, device in zip(jobs, cycle(devices), strict=False)
        ]
        # A single worker is a process too: a job that takes its process down must not take the
        # fleet with it.
        processes = max(workers, 2) if workers > 0 else workers
        dispatched = workers if workers > 0 else "2*n_jobs"
        with parallel_config(backend="loky", n_jobs=processes, inner_max_num_threads=1):
            try:
                parallel = Parallel(return_as="generator_unordered", pre_dispatch=dispatched)
                for outcome in parallel(delayed(run_job)(job, plan) for job in placed):
                    unfinished.remove(outcome.name)
                    yield outcome
            except BrokenProcessPool as error:
                for name in unfinished:
                    yield _died(name, error)

    return run


def _died(name: str, error: Exception) -> Outcome:
    return Outcome(name, "died", f"its worker died: {str(error).splitlines()[0]}")


def _check_per_gpu(per_gpu: int, device: str | None) -> None:
    """Raise `LsrError` where jobs are to share a GPU and none is used."""
    if per_gpu != 1 and device != "cuda":
        found = device or "cpu"
        raise LsrError(
            f"{per_gpu} jobs are to share a GPU, but the device is {found}: give device cuda"
        )


def _devices(workers: int, device: str | None, per_gpu: int) -> tuple[int, list[str | None]]:
    """Return the number of processes, and the devices that their jobs take in turn."""
    if device is None:
        return workers, [None]
    check_device(device)
    if device != "cuda":
        return workers, [device]
    import torch

    count = torch.cuda.device_count()
    processes = workers if workers > 0 else count * per_gpu
    return processes, [f"cuda:{i}" for i in range(count)]


def ray_runner(
    address: str = "auto",
    device: str | None = None,
    per_gpu: int = 1,
    *,
    max_submitted: int = 1000,
) -> Runner:
    """Return a runner on the workers of a Ray cluster, which share the file system.

    Parameters
    ----------
    address : str
        Of the cluster, as ``ray.init`` takes it.
    device : str, optional
        As for `lsrdecomp.compress`. With ``"cuda"`` every job asks the cluster for its share of a
        GPU.
    per_gpu : int
        Jobs that share a GPU.
    max_submitted : int
        Jobs handed to the cluster at a time; by hand.

    Returns
    -------
    callable
        A `Runner` for `run_fleet`.

    Raises
    ------
    LsrError
        If ``per_gpu`` is given without the device cuda; when it is run, if ray is missing or the
        cluster lacks the device.
    """
    _check_per_gpu(per_gpu, device)

    def run(jobs: Sequence[Job], plan: CompressionPlan) -> Iterator[Outcome]:
        with needs("a cluster", "fleet"):
            import ray
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False)
        gpus = 1.0 / per_gpu if device == "cuda" else 0.0
        resources: Any = ray.cluster_resources
        if resources().get("GPU", 0.0) < gpus:
            raise LsrError(f"device {device!r}: no node of the Ray cluster has a GPU")
        environment = {"env_vars": ONE_THREAD}
        on_a_worker = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0, runtime_env=environment)
        remote = on_a_worker(run_job)
        waiting = [replace(job, device=device) for job in reversed(jobs)]
        running: dict[Any, Job] = {}
        while waiting or running:
            while waiting and len(running) < max_submitted:
                job = waiting.pop()
                running[remote.remote(job, plan)] = job
            ready, _ = ray.wait(list(running), num_returns=1)
            for reference in ready:
                job = running.pop(reference)
                try:
                    yield ray.get(reference)
                except ray.exceptions.RayError as error:
                    yield _died(job.name, error)

    return run
