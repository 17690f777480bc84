"""What was asked for: ``load`` reads a configuration, checks all of it and remembers where each value came from."""

from mpdist.config.load import Resolved, json_schema, leaves, load
from mpdist.config.rules import SUPPORT, check_world, scale_mode
from mpdist.config.schema import Config
from mpdist.errors import ConfigError

__all__ = ["SUPPORT", "Config", "ConfigError", "Resolved", "check_world", "json_schema", "leaves", "load", "scale_mode"]
