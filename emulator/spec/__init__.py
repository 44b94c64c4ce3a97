"""The nouns a user writes: devices, clusters, models, layouts, jobs."""
