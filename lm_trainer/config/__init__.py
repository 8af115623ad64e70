"""The YAML engine, which turns files and overrides into a validated configuration of any class, and back.

loader                 `load`: a file and overrides -> a configuration, or all errors with their positions
yaml_syntax, _nodes    text -> plain data with positions, `!include` resolved
document               plain data, the position of each value, and the problems found so far
value_type             the values that an annotation allows
config_node            positions in a configuration, reached by walking down from its root
overrides              settings of the command line, which are applied to the data
explain                readable problems for the errors of pydantic
render, diff, schema   a configuration as YAML, the differences between two, the JSON schema for editors
"""
