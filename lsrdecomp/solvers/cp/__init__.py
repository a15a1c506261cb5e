"""Three and more factors: canonical polyadic decompositions by alternating least squares and Levenberg–Marquardt."""
