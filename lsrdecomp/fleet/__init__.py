"""Many adapters under one plan: resumable batches (`run_fleet`), run by joblib or Ray."""

from lsrdecomp._renamed import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
