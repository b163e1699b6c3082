"""What is computed and kept wider than the model writes it."""
