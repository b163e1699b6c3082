"""The command line: one file a command, options in, one call into the library, one view out."""
