"""Holds the compiled library `kernels` where a compiler was found at install time."""
