"""A whole run: its loop, what it writes, how it stops."""
