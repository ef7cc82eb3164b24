"""A store of encoded prefixes that several servers share: one process, one folder.

Sits above the rest of transport/: it puts pools' prefix stores on a wire.
"""
