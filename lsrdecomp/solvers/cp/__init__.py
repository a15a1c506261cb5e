"""Three and more factors: canonical polyadic decompositions (CP) by alternating least squares."""
