"""Targets: what a solver is asked to approximate, the norms it is measured in, and the measured error."""
