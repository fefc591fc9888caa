"""What a model would take on a machine, from its configuration and the headers of its files: no weights, no torch."""
