"""New tokens for a script: learned, checked, and added to a tokenizer without changing its old ids."""
