"""The asynchronous half, written by hand; the blocking half is generated from it."""
