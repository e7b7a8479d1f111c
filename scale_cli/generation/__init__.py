"""Continues prompts, token by token: at a terminal, and over HTTP as OpenAI's API does."""
