"""The operation table: names, signatures, types and promises of all operations, a module for each kind."""
