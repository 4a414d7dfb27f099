"""One readable file per architecture, and the table that finds it by name."""
