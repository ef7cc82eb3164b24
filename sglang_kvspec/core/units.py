"""Units of memory."""

GIB = 2**30
