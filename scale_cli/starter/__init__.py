"""A first config for a user's base and text: what the text shows, what is held out, and sizes that fit."""
