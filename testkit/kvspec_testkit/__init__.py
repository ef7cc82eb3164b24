"""Test servers, rigs and fault injectors for tests, benchmarks and examples; never shipped."""
