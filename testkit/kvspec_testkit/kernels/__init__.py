"""Inputs and comparisons that tests and benchmarks of the kernels share."""
