"""HTTP of all processes of a run: the one server with its keys and bodies, and the one client."""
