"""Speed against named peers, measured in one run: one file a benchmark, each hands back data and a table."""
