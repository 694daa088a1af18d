"""The laboratory: the paper's tables and figures from our own measurements."""
