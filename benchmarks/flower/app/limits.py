"""Whom a round protects from, and without whom it ends: the same for all who protect."""

from __future__ import annotations


def limits(nodes: int) -> tuple[int, int]:
    """T just below N / 2, D = N / 4, as over shaped links; (1, 1) for four nodes."""
    return max(1, nodes // 2 - 1), max(1, nodes // 4)
