"""The YAML engine: from files and overrides to a validated configuration of any class, and back.

loader                 `load`: a file and overrides -> a configuration, or all errors with their positions
yaml_syntax, _nodes    text -> plain data with positions, `!include` resolved
document               plain data, the position of each value, the problems found so far
value_type             the values an annotation allows
config_node            positions in a configuration, reached by walking down from its root
overrides              settings of the command line, applied to the data
explain                readable problems for the errors of pydantic
render, diff, schema   a configuration as YAML, the differences of two, the JSON schema for editors
"""
