"""The version, in one place."""

VERSION = "0.3.0"
