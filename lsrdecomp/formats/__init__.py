"""Number formats of stored factors: rounding, bit packing, quantized codes, and which format pays where."""
