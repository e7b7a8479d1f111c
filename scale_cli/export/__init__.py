"""Write a trained run as a folder that other tools load: plain, transformers, adapter."""
