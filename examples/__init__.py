"""Both ends of the relay, each example a program of its own; README.md says how to run them."""
