"""A convolutional network in Flower, under secure aggregation."""
