"""Prefix server: a process that stores encoded prefixes of several servers in one folder.

Unlike the rest of transport/, it may import kv/: it puts prefix stores on a wire.
"""
