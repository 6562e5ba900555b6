"""How published quantisation schemes make values of what they store."""
