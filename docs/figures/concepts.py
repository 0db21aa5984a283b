"""Figures of the concept pages."""
