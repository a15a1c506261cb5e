"""Pairs of separated matrices against a low-rank target: joint least squares in a weighted norm."""
