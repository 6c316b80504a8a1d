"""What can be known of a run before it starts (`docs/configuring.md`)."""
