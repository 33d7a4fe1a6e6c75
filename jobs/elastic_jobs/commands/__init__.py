"""One module per subcommand: `HELP`, `EXAMPLE`, `arguments(parser)` and `run(arguments, backend) -> exit code`."""
