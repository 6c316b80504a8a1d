"""The streams of a run: tasks, samples, plans, partials, dead tasks; and ``connect``, which opens all of them."""
