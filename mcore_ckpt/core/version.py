"""The version of the package, for what names it without importing it whole."""

__version__ = "0.1.0"
