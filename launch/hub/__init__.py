"""Repositories of the Hugging Face Hub: files for a run come into the cache, a trained model into a repository."""
