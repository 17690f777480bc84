"""The parser of each command. A module here is imported when one of its commands is called."""
