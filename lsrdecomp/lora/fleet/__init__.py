"""Many adapters under one plan: resumable batches (`run_fleet`), run by joblib or Ray."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
