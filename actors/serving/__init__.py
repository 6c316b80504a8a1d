"""Engine processes: the built-in engine and SGLang."""
