"""Configuration: from YAML files and overrides to one validated value, and back.

run, trainer   `RunConfig`: the whole run as one value
loader         `load`: a file and overrides -> a validated configuration, or every problem with its position
render, diff   a configuration as YAML, and what differs between two
schema         the JSON schema for editors
"""
