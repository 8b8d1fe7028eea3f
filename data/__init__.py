"""Text to traces to batches: what a predictor is trained on."""
