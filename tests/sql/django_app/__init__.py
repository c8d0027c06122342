"""An app of a user's, with a fenced model."""
