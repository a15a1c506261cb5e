"""Answers judged: the task's own metrics, accuracy and loss; and the most memory that was in use."""

from __future__ import annotations

import sys

import numpy as np
import torch
from scipy.special import log_softmax

from lsrdecomp.training.record import Scores
from lsrdecomp.training.tasks import Task


def judge(task: Task, outputs: np.ndarray, labels: np.ndarray) -> Scores:
    """Scores of a model's outputs.

    Parameters
    ----------
    task : Task
    outputs : ndarray, shape (examples, classes or choices), or (examples, 1) for a regression
    labels : ndarray, shape (examples,)

    Returns
    -------
    Scores
        With a loss of None where the outputs are not finite; such answers count as class 0, or score 0.
    """
    outputs = np.asarray(outputs, dtype=np.float64)
    labels = np.asarray(labels)
    finite = bool(np.isfinite(outputs).all())
    outputs = np.nan_to_num(outputs, nan=0.0, posinf=0.0, neginf=0.0)
    if task.regression:
        answers = outputs[:, 0]
        loss = float(np.mean((answers - labels) ** 2))
        accuracy = None
    else:
        answers = outputs.argmax(-1)
        # log_loss of scikit-learn cuts probabilities off at 2⁻⁵²; a sure and wrong answer costs more than that.
        loss = float(-log_softmax(outputs, axis=-1)[np.arange(len(labels)), labels.astype(int)].mean())
        accuracy = float(np.mean(answers == labels))
    return Scores(task.score(labels, answers), accuracy, loss if finite else None, len(labels))


def reset_peak() -> None:
    """Start measuring the accelerator's memory anew; a process's own peak cannot be reset."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int | None:
    """Most bytes in use: tensors on the accelerator since `reset_peak`, else the process since it started."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
