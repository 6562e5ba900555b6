"""Does a run fit, and what will it cost: before any weight is read."""
