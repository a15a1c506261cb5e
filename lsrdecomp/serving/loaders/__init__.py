"""Servers' own loaders of adapters, run on the CPU by the interpreter that has the server."""
