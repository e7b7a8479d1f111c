"""Text from a trained model, and which head gave each token."""
