"""One module for each format of adapters that is written."""
