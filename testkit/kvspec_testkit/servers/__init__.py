"""Processes of real servers, for tests, benchmarks and the demo. Imports no torch or SGLang."""
