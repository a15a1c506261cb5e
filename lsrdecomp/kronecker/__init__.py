"""Kronecker shapes, the rearrangement, and sums of Kronecker products as values."""
