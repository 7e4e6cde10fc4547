"""The ``mmm`` command: one small file a subcommand. Imports no torch until a subcommand needs it."""
