"""Handwritten digits with Flower, under secure aggregation."""
