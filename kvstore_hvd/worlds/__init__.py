"""Who takes part: finding the other workers, meeting them, and leaving."""
