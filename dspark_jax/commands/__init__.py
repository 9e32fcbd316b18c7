"""The commands of `dspark`: a module each, which `cli.make_parser` lists.

A command has `SUMMARY`, `DESCRIPTION`, `EPILOG`, `add_arguments(parser)` and
`run(arguments) -> exit status`, and imports JAX only when it runs.
"""
