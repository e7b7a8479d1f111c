"""The config file: its schema, and how YAML and command-line overrides become one."""
