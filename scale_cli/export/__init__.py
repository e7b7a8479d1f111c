"""From a trained run to a folder other tools load: plain Llama, transformers, adapter."""
