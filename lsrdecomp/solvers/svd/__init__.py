"""Two factors: truncated singular value decompositions of the rearrangement."""
