"""From translation units to one shared library: compiler, instruction set, flags, compile, link."""
