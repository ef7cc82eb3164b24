"""Streams and prefixes for tests of the pools."""
