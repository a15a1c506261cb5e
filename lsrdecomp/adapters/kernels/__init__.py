"""Kernels: the arithmetic of stacked Kronecker factors, plain torch and free of PEFT."""

from lsrdecomp.adapters.kernels.stacked import apply, expand

__all__ = ["apply", "expand"]
