"""Suites of fine-tuning runs: methods compared, LoRAs compressed and recovered; needs torch."""
