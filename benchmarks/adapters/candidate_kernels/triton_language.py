"""Triton's names if it is installed; otherwise names that let the files of the kernels be read, not run."""
# mypy: ignore-errors

try:
    import triton.language as tl
    from triton import cdiv, jit
except ImportError:
    tl = None

    def jit(function):
        return function

    def cdiv(size: int, step: int) -> int:
        return -(-size // step)


__all__ = ["cdiv", "jit", "tl"]
