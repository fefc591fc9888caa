"""What several tests share: tiny models, lossless configurations, layer drivers, real assets."""
