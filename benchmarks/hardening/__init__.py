"""A hostile day of use: generated requests, streams, refusals."""
