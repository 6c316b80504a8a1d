"""The rewards that ship with Tidemill, by their subject."""
