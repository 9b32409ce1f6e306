"""The command line: `lightck ls`, `inspect`, `verify`, `export`, `demo` and others."""
