"""mmserve: a chat service for pictures and text."""

__version__ = "0.1.0"
