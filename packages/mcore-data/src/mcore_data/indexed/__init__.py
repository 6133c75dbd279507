"""The .bin/.idx pair: format, reader, writer, merge."""
