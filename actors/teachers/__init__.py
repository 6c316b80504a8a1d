"""Teachers: servers that score the tokens of samples, as an actor asks them."""
