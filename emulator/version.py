"""The version, as reports and the command line print it; pyproject.toml has the same."""

__version__ = "0.1.0"
