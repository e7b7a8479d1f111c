"""Where results land, and how a folder is written so that it is either whole or absent."""
