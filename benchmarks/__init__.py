"""How fast the relay is, and what it costs: `make bench`, or `python -m benchmarks --help`."""
