"""What tests share."""

from pathlib import Path

__all__ = ["ROOT"]

ROOT = Path(__file__).parents[2]
