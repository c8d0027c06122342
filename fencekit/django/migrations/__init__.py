"""Migrations of the two tables."""
