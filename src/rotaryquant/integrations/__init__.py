"""Optional hosts; nothing outside these folders imports them."""
