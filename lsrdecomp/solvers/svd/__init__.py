"""Two factors: truncated singular value decompositions of the rearrangement, dense, by Gram matrix, by Golub–Kahan."""
