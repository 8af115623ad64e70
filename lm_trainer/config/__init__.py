"""The YAML engine: from files and overrides to a validated configuration of any class, and back.

loader                 `load`: a file and overrides -> a configuration, or all its faults, each with its position
yaml_syntax, _nodes    text -> plain data with positions, `!include` resolved
document               plain data, the position of each value, the problems so far
shape, place           the values that annotations allow, and the way down to a key
overrides              settings of the command line, put into the data
explain                errors of pydantic as a person would put them
render, diff, schema   a configuration as YAML, the differences of two, the JSON schema for editors
"""
