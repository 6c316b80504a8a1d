"""Messages, streams and rows: all that crosses from one Tidemill process to another. Imports no torch."""
