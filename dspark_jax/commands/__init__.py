"""The commands of `dspark`, a module each: `SUMMARY`, `EPILOG`, `add_arguments`, `run`."""
