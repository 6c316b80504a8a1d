"""The page of a run (``tidemill dashboard``): one reader of the bus, its answers over HTTP, and an export."""
