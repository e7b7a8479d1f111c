"""New tokens for a new script: learned, proved, and added to a tokenizer whose old ids all stay."""
