"""What fits into a memory budget, what it costs and what to change, from config.json and headers: no weight is read."""
