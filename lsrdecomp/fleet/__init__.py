"""Many adapters under one plan: resumable batches, run by joblib or Ray."""
