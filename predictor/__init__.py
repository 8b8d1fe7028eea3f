"""What a predictor is."""
