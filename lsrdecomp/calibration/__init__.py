"""K-FAC statistics of a base model's layers, measured on data; needs torch."""
