"""Files that hold weights."""
