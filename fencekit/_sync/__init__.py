"""The blocking half, generated from the asynchronous one by generate_sync.py: do not edit."""
