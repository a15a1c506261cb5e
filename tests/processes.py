"""Functions in processes of their own, which begin with all that this one has imported."""

import multiprocessing
import os
import socket
import sys

from console import run_command


def start_process(function, *arguments, **environment):
    """Begin ``function(*arguments)`` in another process."""
    context = multiprocessing.get_context("fork" if _is_alone() else "spawn")
    process = context.Process(target=_run, args=(function, arguments, environment))
    process.start()
    return process


def run_together(count, function, *arguments):
    """Call a function in ``count`` processes of one group; return their exit codes.

    torch and accelerate take them for a group of their own.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        start_process(function, *arguments, RANK=i, LOCAL_RANK=i, **group) for i in range(count)
    ]
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def run_command_here(*arguments):
    """Run the console command as this process."""
    done = run_command(*arguments)
    print(done.stdout)
    print(done.stderr, file=sys.stderr)
    raise SystemExit(done.returncode)


def _is_alone():
    """Return whether no thread of JAX or torch runs, for which a fork would wait."""
    if "jax" in sys.modules:
        return False
    torch = sys.modules.get("torch")
    return torch is None or (torch.get_num_threads() == 1 and not torch.accelerator.is_available())


def _run(function, arguments, environment):
    os.environ.update({name: str(value) for name, value in environment.items()})
    if environment:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    function(*arguments)
