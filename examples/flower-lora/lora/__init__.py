"""LoRA adapters of a small transformer with Flower, under secure aggregation."""
